// Streams and events of the fake runtime, and how work gets into a stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/support/cuda/fake_cuda.h"
#include "tests/support/cuda/fake_signal.h"
#include "tests/support/cuda/fake_worker.h"

namespace cpattn::fake_cuda {

/// What a stream does at one point; may block. An error stops the device for good.
using Operation = std::function<cudaError_t()>;

struct Stream final : CUstream_st {
  Stream(int stream_device, unsigned stream_flags, int stream_priority);

  void launch(const cuda_host::LaunchShape& shape, std::function<void()> thread) override;

  const int device;
  const unsigned flags;
  const int priority;
  const std::shared_ptr<Worker> worker;  ///< shared with who waits for the whole device
  /// What the stream's work is recorded into, 0: none. Changed by fake_capture.cpp only.
  std::atomic<std::uint64_t> capture{0};
  std::vector<int> frontier;  ///< nodes that what comes next comes after; likewise

  bool is_capturing() const { return capture.load(std::memory_order_relaxed) != 0; }
};

Stream* make_stream(int device, unsigned flags, int priority);
/// What is queued is still done.
void destroy_stream(Stream& stream);

/// The stream of a handle. Null where there is none, and then `error` says why: the legacy default
/// stream and the per-thread one are nobody's here, and end a capture that forbids them.
Stream* stream_of(cudaStream_t handle, const char* api, cudaError_t* error);
/// Calls function(stream).
template <class Function>
cudaError_t with_stream(cudaStream_t handle, const char* api, Function function) {
  cudaError_t error = cudaSuccess;
  Stream* stream = stream_of(handle, api, &error);
  return stream != nullptr ? function(*stream) : error;
}

/// Appends to the stream, or to the graph that it is being captured into. `name` is for messages.
cudaError_t enqueue(Stream& stream, const char* name, Operation operation);
/// Runs an operation on the calling Worker's thread as a device would: not after an error.
void perform(int device, const Operation& operation);

/// Waits for the streams of a device; `only_blocking`: those that the legacy default stream waits
/// for.
void wait_for_streams(int device, bool only_blocking);

/// One record of an event: each is its own, since who waits, waits for the latest of its time.
struct Completion {
  Signal signal;
  std::atomic<std::int64_t> when_ns{0};  ///< of a steady clock; set before the signal

  /// Lives for ever: whoever let go of it last would otherwise come after all it had signalled,
  /// and a host that records an event anew would order streams that nothing orders.
  static Completion* make();
};

struct Event {
  int device = 0;
  bool has_timing = true;
  std::mutex mutex;              ///< of hosts that share the event; no stream takes it
  Completion* latest = nullptr;  ///< null before the first record
  std::uint64_t capture = 0;     ///< the one it was last recorded in, 0: none
  std::vector<int> nodes;        ///< that it comes after, there
};

}  // namespace cpattn::fake_cuda

struct CUevent_st : cpattn::fake_cuda::Event {};
