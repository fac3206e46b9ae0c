// The runtime's functions of memory that belongs to a device or to the host at once.
#include <cstdlib>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_memory.h"
#include "tests/support/cuda/fake_state.h"

using namespace cpattn::fake_cuda;

namespace {

cudaError_t allocate_at_once(const char* api, void** memory, std::size_t bytes, MemoryKind kind) {
  if (memory == nullptr) return refuse(cudaErrorInvalidValue, api, ": nowhere to put the pointer");
  *memory = nullptr;
  if (machine().num_devices == 0) return refuse(cudaErrorNoDevice, "no device");
  if (const cudaError_t error = check_unsafe_call(api); error != cudaSuccess) return error;
  if (bytes == 0) return cudaSuccess;
  *memory = allocate(bytes, kind, current_device(), false);
  if (*memory != nullptr) return cudaSuccess;
  return refuse(cudaErrorMemoryAllocation, api, ": no ", bytes, " bytes left");
}

cudaError_t free_at_once(const char* api, void* memory, MemoryKind kind) {
  if (memory == nullptr) return cudaSuccess;
  if (const cudaError_t error = check_unsafe_call(api); error != cudaSuccess) return error;
  const std::optional<Allocation> allocation = forget(memory, kind);
  if (!allocation) {
    return refuse(cudaErrorInvalidValue, api, ": no such memory begins here, or no longer");
  }
  if (kind == MemoryKind::device) {
    add_used_bytes(allocation->device, -static_cast<std::int64_t>(allocation->bytes));
  }
  std::free(memory);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  static Api& api = Api::named(__func__);
  return api.call(
      [&] { return allocate_at_once("cudaMalloc", memory, bytes, MemoryKind::device); });
}

cudaError_t cudaFree(void* memory) {
  Api::named(__func__).enter();  // must work after any error, so that everything can be given back
  return Api::finish(free_at_once(__func__, memory, MemoryKind::device));
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  static Api& api = Api::named(__func__);
  return api.call(
      [&] { return allocate_at_once("cudaMallocHost", memory, bytes, MemoryKind::pinned); });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if ((flags & ~known) != 0) return refuse(cudaErrorInvalidValue, "cudaHostAlloc: flags ", flags);
    return allocate_at_once("cudaHostAlloc", memory, bytes, MemoryKind::pinned);
  });
}

cudaError_t cudaFreeHost(void* memory) {
  Api::named(__func__).enter();
  return Api::finish(free_at_once(__func__, memory, MemoryKind::pinned));
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const unsigned known = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (memory == nullptr || bytes == 0 || (flags & ~known) != 0) {
      return refuse(cudaErrorInvalidValue, "cudaHostRegister: no memory, or flags ", flags);
    }
    const cudaError_t error = check_unsafe_call("cudaHostRegister");
    if (error != cudaSuccess) return error;
    if (register_memory(memory, bytes, current_device())) return cudaSuccess;
    return refuse(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister: in part known already");
  });
}

cudaError_t cudaHostUnregister(void* memory) {
  Api::named(__func__).enter();
  const bool is_known = forget(memory, MemoryKind::registered).has_value();
  return Api::finish(is_known ? cudaSuccess
                              : refuse(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister"));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *attributes = {};
    const std::optional<Allocation> allocation = find_allocation(pointer);
    void* const here = const_cast<void*>(pointer);
    if (!allocation) {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
      attributes->hostPointer = here;
      return cudaSuccess;
    }
    const bool is_host = allocation->kind != MemoryKind::device;
    attributes->type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = allocation->device;
    attributes->devicePointer = here;
    attributes->hostPointer = is_host ? here : nullptr;
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *total_bytes = machine().memory_bytes;
    *free_bytes = *total_bytes - static_cast<std::size_t>(used_bytes(current_device()));
    return cudaSuccess;
  });
}
