// The runtime's functions of stream-ordered memory.
//
// Memory of a pool is NaN when its stream gets to the allocation and gone when its stream gets to
// the release: use by another stream that has not waited for either is a race to the thread
// sanitizer, and use after the release an error to the address sanitizer. A pool keeps nothing
// back; its figures are for programs that report them.
#include <cstdlib>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_memory.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_cuda;

struct CUmemPoolHandle_st {
  int device = 0;
  std::atomic<std::uint64_t> release_threshold{0};
};

namespace {

CUmemPoolHandle_st* default_pool(int device) {
  static CUmemPoolHandle_st pools[kMaxDevices];
  CUmemPoolHandle_st& pool = pools[device];
  pool.device = device;
  return &pool;
}

cudaError_t check_pools(int device) {
  if (device < 0 || device >= machine().num_devices) {
    return refuse(cudaErrorInvalidDevice, "device ", device, " of ", machine().num_devices);
  }
  return machine().has_memory_pools ? cudaSuccess
                                    : refuse(cudaErrorNotSupported, "no memory pools here");
}

cudaError_t allocate_in(const char* api, Stream& stream, int device, std::size_t bytes,
                        void** memory) {
  *memory = nullptr;
  if (const cudaError_t error = check_pools(device); error != cudaSuccess) return error;
  if (stream.is_capturing()) return refuse_in_capture(stream, api);
  if (bytes == 0) return cudaSuccess;
  void* const made = allocate(bytes, MemoryKind::device, device, true);
  if (made == nullptr) return refuse(cudaErrorMemoryAllocation, api, ": no ", bytes, " bytes left");
  *memory = made;
  return enqueue(stream, api, [made, bytes] {
    fill_with_nan(made, bytes);
    return cudaSuccess;
  });
}

cudaError_t free_in(Stream& stream, void* memory) {
  if (stream.is_capturing()) return refuse_in_capture(stream, "cudaFreeAsync");
  const std::optional<Allocation> allocation = forget(memory, MemoryKind::device);
  if (!allocation) {
    return refuse(cudaErrorInvalidValue, "cudaFreeAsync: no such memory, or no longer");
  }
  // Also after an error, unlike other operations: it must not leak.
  stream.worker->push([it = *allocation] {
    Worker::delay();
    add_used_bytes(it.device, -static_cast<std::int64_t>(it.bytes));
    std::free(it.begin);
  });
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMallocAsync", [&](Stream& stream) {
      return allocate_in("cudaMallocAsync", stream, stream.device, bytes, memory);
    });
  });
}

cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMallocFromPoolAsync", [&](Stream& stream) {
      return allocate_in("cudaMallocFromPoolAsync", stream, pool->device, bytes, memory);
    });
  });
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t handle) {
  Api::named(__func__).enter();  // must work after any error, so that everything can be given back
  return Api::finish(with_stream(handle, "cudaFreeAsync",
                                 [&](Stream& stream) { return free_in(stream, memory); }));
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_pools(device);
    if (error == cudaSuccess) *pool = default_pool(device);
    return error;
  });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (properties->allocType != cudaMemAllocationTypePinned ||
        properties->location.type != cudaMemLocationTypeDevice) {
      return refuse(cudaErrorInvalidValue, "cudaMemPoolCreate: not of pinned memory of a device");
    }
    const cudaError_t error = check_pools(properties->location.id);
    if (error != cudaSuccess) return error;
    *pool = new CUmemPoolHandle_st;
    (*pool)->device = properties->location.id;
    add(counts().pools, 1);
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  Api::named(__func__).enter();
  if (pool == nullptr || pool == default_pool(pool->device)) {
    return Api::finish(refuse(cudaErrorInvalidValue, "cudaMemPoolDestroy: not a pool of yours"));
  }
  delete pool;
  add(counts().pools, -1);
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return pool != nullptr ? cudaSuccess : cudaErrorInvalidValue; });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (attribute == cudaMemPoolAttrReleaseThreshold) {
      pool->release_threshold.store(*static_cast<std::uint64_t*>(value));
    }
    return cudaSuccess;  // how a pool reuses memory is nobody's concern where it keeps none
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    switch (static_cast<int>(attribute)) {
      case cudaMemPoolAttrReleaseThreshold:
        *static_cast<std::uint64_t*>(value) = pool->release_threshold.load();
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemCurrent:
      case cudaMemPoolAttrUsedMemCurrent:
        *static_cast<std::uint64_t*>(value) = static_cast<std::uint64_t>(used_bytes(pool->device));
        return cudaSuccess;
    }
    return refuse(cudaErrorNotSupported, "cudaMemPoolGetAttribute: attribute ",
                  static_cast<int>(attribute));
  });
}
