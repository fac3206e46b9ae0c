// What all calls of the fake runtime share: current device, errors, failures asked for by a test,
// counts. Streams touch relaxed atomics only; a lock would order them (fake_signal.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "src/base/error.h"
#include "tests/support/cuda/fake_cuda.h"

namespace cpattn::fake_cuda {

/// What Live counts.
struct Counts {
  using Count = std::atomic<std::int64_t>;
  Count device_allocations{0}, host_allocations{0}, streams{0}, events{0}, graphs{0},
      graph_execs{0}, pools{0}, communicators{0}, pageable_copies{0};
};
Counts& counts();
inline void add(Counts::Count& count, std::int64_t change) {
  count.fetch_add(change, std::memory_order_relaxed);
}

/// Of the calling thread.
int& current_device();
cudaError_t& last_error();

/// The error after which nothing works on the device any more.
cudaError_t sticky_error(int device);
void set_sticky_error(int device, cudaError_t error);

/// Keeps the text for complaint() and gives the error back.
cudaError_t complain(cudaError_t error, std::string text);
template <class... Parts>
cudaError_t refuse(cudaError_t error, const Parts&... parts) {
  return complain(error, detail::concat(parts...));
}
/// The text kept for this error; empty when the last complaint was about another.
std::string complaint_about(cudaError_t error);

const cuda_host::Options& kernel_options();

/// One function of the runtime, or of NCCL: how often it was called, which call is to fail.
class Api {
 public:
  /// The same for the same name, for good.
  static Api& named(const char* name);

  /// Counts the call; the error it is to fail with, or 0.
  int enter();
  void fail_after(int n, int error, int device);
  std::uint64_t num_calls() const { return num_calls_.load(std::memory_order_relaxed); }
  void reset();

  /// What every function of the runtime does around its own work.
  template <class Function>
  cudaError_t call(Function function) {
    cudaError_t error = sticky_error(current_device());
    if (const int injected = enter(); error == cudaSuccess && injected != 0) {
      error = static_cast<cudaError_t>(injected);
    }
    return finish(error != cudaSuccess ? error : function());
  }
  /// Remembers an error for cudaGetLastError.
  static cudaError_t finish(cudaError_t error);

 private:
  std::atomic<std::uint64_t> num_calls_{0};
  std::atomic<int> calls_left_{0};  ///< until the one that fails; 0: none does
  std::atomic<int> error_{0};
  std::atomic<int> device_{-1};
};

}  // namespace cpattn::fake_cuda
