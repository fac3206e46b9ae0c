// The runtime's functions of events.
#include <chrono>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_cuda;

namespace {

cudaError_t create_event(cudaEvent_t* event, unsigned flags) {
  if (machine().num_devices == 0) return refuse(cudaErrorNoDevice, "no device");
  const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming;
  if ((flags & ~known) != 0) return refuse(cudaErrorInvalidValue, "cudaEventCreate: flags ", flags);
  *event = new CUevent_st;
  (*event)->device = current_device();
  (*event)->has_timing = (flags & cudaEventDisableTiming) == 0;
  add(counts().events, 1);
  return cudaSuccess;
}

cudaError_t record(Stream& stream, Event& event) {
  if (event.device != stream.device) {
    return refuse(cudaErrorInvalidResourceHandle, "cudaEventRecord: an event of device ",
                  event.device, " in a stream of device ", stream.device);
  }
  if (stream.is_capturing()) return capture_record(stream, event);
  Completion* const completion = Completion::make();
  {
    const std::lock_guard lock(event.mutex);
    event.capture = 0;
    event.latest = completion;
  }
  // Also after an error: nobody may wait for ever.
  stream.worker->push([completion] {
    Worker::delay();
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    completion->when_ns.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
    completion->signal.set();
  });
  return cudaSuccess;
}

const Completion* latest_of(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.latest;
}

cudaError_t wait(Stream& stream, Event& event) {
  bool is_done = false;
  const cudaError_t error = capture_wait(stream, event, &is_done);
  if (is_done) return error;
  const Completion* completion = latest_of(event);
  if (completion != nullptr) stream.worker->push([completion] { completion->signal.wait(); });
  return cudaSuccess;
}

/// Whether the host may ask the event.
cudaError_t check_question(cudaEvent_t event, const char* api) {
  if (event == nullptr) return refuse(cudaErrorInvalidResourceHandle, api, ": no event");
  const cudaError_t error = check_not_captured(*event, api);
  return error != cudaSuccess ? error : check_unsafe_call(api);
}

}  // namespace

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return create_event(event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return create_event(event, flags); });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Api::named(__func__).enter();  // must work after any error, so that everything can be given back
  if (event == nullptr) return Api::finish(cudaErrorInvalidResourceHandle);
  delete event;
  add(counts().events, -1);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (event == nullptr)
      return refuse(cudaErrorInvalidResourceHandle, "cudaEventRecord: no event");
    return with_stream(handle, "cudaEventRecord",
                       [&](Stream& stream) { return record(stream, *event); });
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (event == nullptr || flags != cudaEventWaitDefault) {
      return refuse(cudaErrorInvalidValue, "cudaStreamWaitEvent: no event, or flags");
    }
    return with_stream(handle, "cudaStreamWaitEvent",
                       [&](Stream& stream) { return wait(stream, *event); });
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_question(event, "cudaEventQuery");
    if (error != cudaSuccess) return error;
    const Completion* completion = latest_of(*event);
    const bool is_done = completion == nullptr || completion->signal.is_set();
    return is_done ? sticky_error(event->device) : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_question(event, "cudaEventSynchronize");
    if (error != cudaSuccess) return error;
    if (const Completion* completion = latest_of(*event)) completion->signal.wait();
    return sticky_error(event->device);
  });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    for (const cudaEvent_t event : {start, end}) {
      const cudaError_t error = check_question(event, "cudaEventElapsedTime");
      if (error != cudaSuccess) return error;
      if (!event->has_timing || latest_of(*event) == nullptr) {
        return refuse(cudaErrorInvalidResourceHandle,
                      "cudaEventElapsedTime: without timing, or never recorded");
      }
      if (!latest_of(*event)->signal.is_set()) return cudaErrorNotReady;
    }
    const auto ns = latest_of(*end)->when_ns.load() - latest_of(*start)->when_ns.load();
    *ms = static_cast<float>(ns) * 1e-6f;
    return cudaSuccess;
  });
}
