// Streams whose work is recorded instead of done, and what may not be done meanwhile.
//
// As the runtime defines it: a capture begins in one stream and spreads to those that wait for an
// event recorded in it; work of a stream comes after that stream's frontier; what is against the
// rules invalidates the capture, and the next calls and its end say so.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "tests/support/cuda/fake_stream.h"

namespace cpattn::fake_cuda {

struct Node {
  Operation operation;
  int device = 0;
  const char* name = "";
  std::vector<int> after;  ///< all smaller than the node's own number
};

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
/// The nodes, in an order in which they may run.
cudaError_t end_capture(Stream& stream, std::vector<Node>* nodes);
cudaStreamCaptureStatus capture_status(const Stream& stream);
/// Exchanges the calling thread's mode.
cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

/// For a stream that is capturing.
cudaError_t capture_operation(Stream& stream, const char* name, Operation operation);
cudaError_t capture_record(Stream& stream, Event& event);

/// The stream waits for the event. `*is_done`: captures have seen to it (or refused it); otherwise
/// neither is part of one.
cudaError_t capture_wait(Stream& stream, Event& event, bool* is_done);

/// The stream is going away, which ends what it takes part in.
void leave_capture(Stream& stream);

/// Refuses a call on a capturing stream that would have to wait for it, and invalidates.
cudaError_t refuse_in_capture(Stream& stream, const char* api);
/// Success, or: the event was last recorded in a capture, so it cannot be asked.
cudaError_t check_not_captured(Event& event, const char* api);
/// Success, or: a capture forbids the calling thread everything that might synchronise or allocate
/// (cudaThreadExchangeStreamCaptureMode has the rules). Invalidates it.
cudaError_t check_unsafe_call(const char* api,
                              cudaError_t error = cudaErrorStreamCaptureUnsupported);

}  // namespace cpattn::fake_cuda
