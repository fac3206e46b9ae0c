// The runtime's copies and fills: what is refused, and when they happen.
#include <cstring>
#include <memory>
#include <utility>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_memory.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_cuda;

namespace {

/// `height` rows of `width` bytes.
struct Copy {
  void* to = nullptr;
  std::size_t to_pitch = 0;
  const void* from = nullptr;
  std::size_t from_pitch = 0;
  std::size_t width = 0;
  std::size_t height = 1;
  cudaMemcpyKind kind = cudaMemcpyDefault;

  void perform() const {
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch, width);
    }
  }
};

enum class Side { device, pinned, pageable };

/// Where the rows lie. An error: partly outside of their allocation.
cudaError_t locate(const char* api, const void* first, std::size_t pitch, const Copy& copy,
                   Side* side) {
  const std::optional<Allocation> allocation = find_allocation(first);
  *side = Side::pageable;
  if (!allocation) return cudaSuccess;
  *side = allocation->kind == MemoryKind::device ? Side::device : Side::pinned;
  const std::size_t extent = (copy.height - 1) * pitch + copy.width;
  const auto before =
      static_cast<std::size_t>(static_cast<const std::byte*>(first) - allocation->begin);
  if (before + extent <= allocation->bytes) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, api, ": ", extent, " bytes from byte ", before,
                " of an allocation of ", allocation->bytes);
}

bool agrees(cudaMemcpyKind kind, Side to, Side from) {
  const bool to_device = to == Side::device, from_device = from == Side::device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

cudaError_t check(const char* api, const Copy& copy, Side* to, Side* from) {
  if (copy.to == nullptr || copy.from == nullptr) {
    return refuse(cudaErrorInvalidValue, api, ": a null pointer");
  }
  if (copy.height > 1 && (copy.to_pitch < copy.width || copy.from_pitch < copy.width)) {
    return refuse(cudaErrorInvalidPitchValue, api, ": rows of ", copy.width, " bytes overlap");
  }
  cudaError_t error = locate(api, copy.to, copy.to_pitch, copy, to);
  if (error == cudaSuccess) error = locate(api, copy.from, copy.from_pitch, copy, from);
  if (error != cudaSuccess) return error;
  if (agrees(copy.kind, *to, *from)) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, api, ": the direction contradicts the pointers");
}

/// On the legacy default stream, which waits for blocking streams.
cudaError_t copy_now(const char* api, const Copy& copy) {
  if (const cudaError_t error = check_unsafe_call(api); error != cudaSuccess) return error;
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  Side to{}, from{};
  if (const cudaError_t error = check(api, copy, &to, &from); error != cudaSuccess) return error;
  wait_for_streams(current_device(), true);
  copy.perform();
  return cudaSuccess;
}

/// A copy from pageable memory has read it when the call returns, one to pageable memory is done
/// then; but a captured one touches it at replay.
cudaError_t copy_in(const char* api, Stream& stream, const Copy& copy) {
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  Side to{}, from{};
  if (const cudaError_t error = check(api, copy, &to, &from); error != cudaSuccess) return error;
  const auto copy_all = [copy] {
    copy.perform();
    return cudaSuccess;
  };
  const bool is_pageable = to == Side::pageable || from == Side::pageable;
  if (!is_pageable || stream.is_capturing()) return enqueue(stream, api, copy_all);
  add(counts().pageable_copies, 1);
  if (to == Side::pageable) {
    const cudaError_t error = enqueue(stream, api, copy_all);
    stream.worker->wait();
    return error;
  }
  auto staged = std::make_shared<std::byte[]>(copy.width * copy.height);
  Copy out = copy;
  out.from = staged.get();
  out.from_pitch = copy.width;
  Copy in = copy;
  in.to = staged.get();
  in.to_pitch = copy.width;
  in.perform();
  // Moved: a share that the host drops would order the host after the stream.
  return enqueue(stream, api, [out, share = std::move(staged)] {
    out.perform();
    return cudaSuccess;
  });
}

cudaError_t check_fill(const char* api, void* to, std::size_t bytes) {
  Side side{};
  const Copy extent{.to = to, .width = bytes};
  if (const cudaError_t error = locate(api, to, 0, extent, &side); error != cudaSuccess) {
    return error;
  }
  if (side != Side::pageable) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, api, ": not memory of a device");
}

}  // namespace

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return copy_now("cudaMemcpy", {.to = to, .from = from, .width = bytes, .kind = kind});
  });
}

cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return copy_now("cudaMemcpy2D", {to, to_pitch, from, from_pitch, width, height, kind});
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMemcpyAsync", [&](Stream& stream) {
      return copy_in("cudaMemcpyAsync", stream,
                     {.to = to, .from = from, .width = bytes, .kind = kind});
    });
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMemcpy2DAsync", [&](Stream& stream) {
      return copy_in("cudaMemcpy2DAsync", stream,
                     {to, to_pitch, from, from_pitch, width, height, kind});
    });
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                std::size_t bytes, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMemcpyPeerAsync", [&](Stream& stream) {
      const auto is_on = [](const void* place, int device) {
        const std::optional<Allocation> allocation = find_allocation(place);
        return allocation && allocation->kind == MemoryKind::device && allocation->device == device;
      };
      if (!is_on(to, to_device) || !is_on(from, from_device)) {
        return refuse(cudaErrorInvalidValue, "cudaMemcpyPeerAsync: not memory of that device");
      }
      return copy_in("cudaMemcpyPeerAsync", stream,
                     {.to = to, .from = from, .width = bytes, .kind = cudaMemcpyDeviceToDevice});
    });
  });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    cudaError_t error = check_unsafe_call("cudaMemset");
    if (error == cudaSuccess && bytes > 0) error = check_fill("cudaMemset", to, bytes);
    if (error != cudaSuccess || bytes == 0) return error;
    wait_for_streams(current_device(), true);
    std::memset(to, value, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaMemsetAsync", [&](Stream& stream) {
      if (bytes == 0) return cudaSuccess;
      const cudaError_t error = check_fill("cudaMemsetAsync", to, bytes);
      if (error != cudaSuccess) return error;
      return enqueue(stream, "memset", [to, value, bytes] {
        std::memset(to, value, bytes);
        return cudaSuccess;
      });
    });
  });
}
