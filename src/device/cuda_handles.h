// Streams, events and the current device of CUDA as values that give themselves back.
//
// Everything here is for the ground floor's own use: what the library's callers see of CUDA is
// Device, Stream and Buffer.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>
#include <utility>

#include "src/base/error.h"

namespace cpattn {

/// DeviceError unless `status` is success, with CUDA's text. What is not for ever is then taken
/// back from the thread, so that a caller's own check does not find our error.
inline void cuda_check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  throw DeviceError(
      detail::concat(what, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

/// Makes a device the current one of this thread, for this scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
    cuda_check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == ordinal) return;
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    has_changed_ = true;
  }
  ~DeviceGuard() {
    if (has_changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool has_changed_ = false;
};

/// Lets this thread ask streams and events that take no part in a capture, in this scope, although
/// another stream is being captured: otherwise the question would end that capture.
class CaptureBystander {
 public:
  CaptureBystander() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureBystander() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  CaptureBystander(const CaptureBystander&) = delete;
  CaptureBystander& operator=(const CaptureBystander&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A CUDA object that `Destroy` gives back; move-only, null after a move.
template <class Handle, cudaError_t (*Destroy)(Handle)>
class CudaHandle {
 public:
  CudaHandle() = default;
  explicit CudaHandle(Handle handle) : handle_(handle) {}
  CudaHandle(CudaHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CudaHandle& operator=(CudaHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaHandle() {
    if (handle_ != nullptr) Destroy(handle_);
  }

  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

using CudaStream = CudaHandle<cudaStream_t, cudaStreamDestroy>;
using CudaEvent = CudaHandle<cudaEvent_t, cudaEventDestroy>;

enum class StreamPriority { usual, high };

/// Of the current device; ordered with no other stream.
[[nodiscard]] inline CudaStream make_cuda_stream(StreamPriority priority = StreamPriority::usual) {
  int least = 0, greatest = 0;
  if (priority == StreamPriority::high) {
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
               "cudaDeviceGetStreamPriorityRange");
  }
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
             "cudaStreamCreateWithPriority");
  return CudaStream(stream);
}

/// Of the current device, without timing, which costs.
[[nodiscard]] inline CudaEvent make_cuda_event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return CudaEvent(event);
}

/// `after` waits for all that `before` was given so far. Both may be in one capture.
inline void order_streams(cudaStream_t before, const CudaEvent& event, cudaStream_t after) {
  cuda_check(cudaEventRecord(event.get(), before), "cudaEventRecord");
  cuda_check(cudaStreamWaitEvent(after, event.get(), cudaEventWaitDefault), "cudaStreamWaitEvent");
}

/// Whether a question was answered "done"; DeviceError for anything but "not yet", which is taken
/// out of the thread's last error, as the runtime keeps it there like any other.
inline bool is_cuda_done(cudaError_t answer, std::string_view what) {
  if (answer == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cuda_check(answer, what);
  return true;
}

}  // namespace cpattn
