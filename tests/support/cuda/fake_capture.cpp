#include "tests/support/cuda/fake_capture.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/support/cuda/fake_state.h"

namespace cpattn::fake_cuda {
namespace {

struct Capture {
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool is_valid = true;
  std::vector<Node> nodes;
  std::vector<Stream*> members;
};

/// All that are going on. Hosts only, and only those that capture, pass the lock.
struct Captures {
  std::mutex mutex;
  std::map<std::uint64_t, Capture> by_id;
  std::uint64_t newest = 0;
};
Captures captures;
std::atomic<int> num_captures{0};

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/// With the lock. Null: over.
Capture* find(std::uint64_t id) {
  const auto it = captures.by_id.find(id);
  return it == captures.by_id.end() ? nullptr : &it->second;
}

Capture* capture_of(const Stream& stream) {
  return find(stream.capture.load(std::memory_order_relaxed));
}

void join(Stream& stream, std::uint64_t id, Capture& capture) {
  stream.capture.store(id, std::memory_order_relaxed);
  stream.frontier.clear();
  capture.members.push_back(&stream);
}

cudaError_t invalidate(Capture& capture, cudaError_t error, const std::string& text) {
  capture.is_valid = false;
  return complain(error, text);
}

cudaError_t refuse_invalidated(const char* name) {
  return refuse(cudaErrorStreamCaptureInvalidated, name,
                ": an earlier call has invalidated this capture");
}

/// Whether the last node of every stream comes before what the origin would do next.
bool is_joined(const Capture& capture) {
  std::vector<bool> is_before(capture.nodes.size(), false);
  for (const int node : capture.origin->frontier) is_before[static_cast<std::size_t>(node)] = true;
  for (std::size_t node = capture.nodes.size(); node-- > 0;) {
    if (!is_before[node]) return false;
    for (const int before : capture.nodes[node].after) {
      is_before[static_cast<std::size_t>(before)] = true;
    }
  }
  return true;
}

bool forbids_unsafe_calls(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != cudaStreamCaptureModeRelaxed;
  }
  return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

/// With the lock: takes the capture out of the world.
Capture close(std::uint64_t id) {
  Capture capture = std::move(captures.by_id.at(id));
  captures.by_id.erase(id);
  num_captures.fetch_sub(1, std::memory_order_relaxed);
  for (Stream* member : capture.members) {
    member->capture.store(0, std::memory_order_relaxed);
    member->frontier.clear();
  }
  return capture;
}

}  // namespace

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(captures.mutex);
  if (capture_of(stream) != nullptr) {
    return refuse(cudaErrorIllegalState, "cudaStreamBeginCapture: the stream is being captured");
  }
  const std::uint64_t id = ++captures.newest;
  Capture& capture = captures.by_id[id];
  capture.origin = &stream;
  capture.mode = mode;
  capture.thread = std::this_thread::get_id();
  join(stream, id, capture);
  num_captures.fetch_add(1, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t end_capture(Stream& stream, std::vector<Node>* nodes) {
  const std::lock_guard lock(captures.mutex);
  Capture* found = capture_of(stream);
  if (found == nullptr) {
    return refuse(cudaErrorIllegalState, "cudaStreamEndCapture: nothing is being captured");
  }
  if (found->origin != &stream) {
    return invalidate(*found, cudaErrorStreamCaptureUnmatched,
                      "cudaStreamEndCapture: not the stream in which the capture began");
  }
  if (found->mode != cudaStreamCaptureModeRelaxed && found->thread != std::this_thread::get_id()) {
    return invalidate(*found, cudaErrorStreamCaptureWrongThread,
                      "cudaStreamEndCapture: not the thread that began the capture");
  }
  const bool is_complete = is_joined(*found);
  const Capture capture = close(stream.capture.load(std::memory_order_relaxed));
  if (!capture.is_valid) return refuse_invalidated("cudaStreamEndCapture");
  if (!is_complete) {
    return refuse(cudaErrorStreamCaptureUnjoined,
                  "cudaStreamEndCapture: work of another stream "
                  "of this capture that the origin has not waited for");
  }
  *nodes = capture.nodes;
  return cudaSuccess;
}

cudaStreamCaptureStatus capture_status(const Stream& stream) {
  if (!stream.is_capturing()) return cudaStreamCaptureStatusNone;
  const std::lock_guard lock(captures.mutex);
  const Capture* capture = capture_of(stream);
  if (capture == nullptr) return cudaStreamCaptureStatusNone;
  return capture->is_valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
}

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode) {
  return std::exchange(thread_mode, mode);
}

cudaError_t capture_operation(Stream& stream, const char* name, Operation operation) {
  const std::lock_guard lock(captures.mutex);
  Capture* capture = capture_of(stream);
  if (capture == nullptr || !capture->is_valid) return refuse_invalidated(name);
  capture->nodes.push_back({std::move(operation), stream.device, name, stream.frontier});
  stream.frontier = {static_cast<int>(capture->nodes.size()) - 1};
  return cudaSuccess;
}

cudaError_t capture_record(Stream& stream, Event& event) {
  const std::lock_guard event_lock(event.mutex);
  const std::lock_guard lock(captures.mutex);
  const Capture* capture = capture_of(stream);
  if (capture == nullptr || !capture->is_valid) return refuse_invalidated("cudaEventRecord");
  event.capture = stream.capture.load(std::memory_order_relaxed);
  event.nodes = stream.frontier;
  return cudaSuccess;
}

cudaError_t capture_wait(Stream& stream, Event& event, bool* is_done) {
  *is_done = true;
  const std::lock_guard event_lock(event.mutex);
  if (event.capture == 0 && !stream.is_capturing()) {
    *is_done = false;
    return cudaSuccess;
  }
  const char* const api = "cudaStreamWaitEvent";
  const std::lock_guard lock(captures.mutex);
  Capture* mine = capture_of(stream);
  Capture* other = find(event.capture);
  if (mine != nullptr && !mine->is_valid) return refuse_invalidated(api);
  if (event.capture == 0) {
    if (!event.latest) return cudaSuccess;  // never recorded: nothing to wait for
    return invalidate(*mine, cudaErrorStreamCaptureIsolation,
                      "cudaStreamWaitEvent: the event was recorded outside of this capture");
  }
  if (other == nullptr) {
    if (mine != nullptr) mine->is_valid = false;
    return refuse(cudaErrorCapturedEvent, api,
                  ": the event was last recorded in a capture that "
                  "is over; record it again first");
  }
  if (!other->is_valid) return refuse_invalidated(api);
  if (mine != nullptr && mine != other) {
    mine->is_valid = false;
    return invalidate(*other, cudaErrorStreamCaptureMerge,
                      "cudaStreamWaitEvent: the event is of another capture");
  }
  if (mine == nullptr) join(stream, event.capture, *other);
  for (const int node : event.nodes) {
    if (std::find(stream.frontier.begin(), stream.frontier.end(), node) == stream.frontier.end()) {
      stream.frontier.push_back(node);
    }
  }
  return cudaSuccess;
}

void leave_capture(Stream& stream) {
  if (!stream.is_capturing()) return;
  const std::lock_guard lock(captures.mutex);
  Capture* capture = capture_of(stream);
  if (capture == nullptr) return;
  if (capture->origin == &stream) {
    close(stream.capture.load(std::memory_order_relaxed));
    return;
  }
  invalidate(*capture, cudaErrorStreamCaptureInvalidated,
             "cudaStreamDestroy: the stream was taking part in a capture");
  std::erase(capture->members, &stream);
}

cudaError_t refuse_in_capture(Stream& stream, const char* api) {
  const std::lock_guard lock(captures.mutex);
  Capture* capture = capture_of(stream);
  const std::string text = detail::concat(api, ": the stream is being captured");
  return capture != nullptr ? invalidate(*capture, cudaErrorStreamCaptureUnsupported, text)
                            : complain(cudaErrorStreamCaptureUnsupported, text);
}

cudaError_t check_not_captured(Event& event, const char* api) {
  const std::lock_guard event_lock(event.mutex);
  if (event.capture == 0) return cudaSuccess;
  const std::lock_guard lock(captures.mutex);
  if (Capture* capture = find(event.capture)) capture->is_valid = false;
  return refuse(cudaErrorCapturedEvent, api, ": the event was last recorded in a capture");
}

cudaError_t check_unsafe_call(const char* api, cudaError_t error) {
  if (num_captures.load(std::memory_order_relaxed) == 0) return cudaSuccess;
  const std::lock_guard lock(captures.mutex);
  cudaError_t result = cudaSuccess;
  for (auto& [id, capture] : captures.by_id) {
    if (!forbids_unsafe_calls(capture)) continue;
    result = invalidate(capture, error, detail::concat(api, ": forbidden during a capture"));
  }
  return result;
}

}  // namespace cpattn::fake_cuda
