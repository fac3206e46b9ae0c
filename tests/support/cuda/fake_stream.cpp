#include "tests/support/cuda/fake_stream.h"

#include <array>
#include <set>
#include <utility>

#include "src/base/error.h"
#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_state.h"

namespace cpattn::fake_cuda {
namespace {

/// The streams there are: for those who wait for all of them, and to know a handle.
struct Streams {
  std::mutex mutex;
  std::set<const Stream*> all;
};
Streams streams;

/// Made when first asked for, and for ever.
Stream* default_stream(int device) {
  static std::array<Stream*, kMaxDevices> all{};
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Stream*& stream = all[static_cast<std::size_t>(device)];
  if (stream == nullptr) stream = new Stream(device, cudaStreamDefault, 0);
  return stream;
}

cudaError_t run_kernel(const cuda_host::LaunchShape& shape, const std::function<void()>& thread,
                       const cuda_host::Options& options) {
  static Api& api = Api::named("kernel");
  if (const int injected = api.enter(); injected != 0) return static_cast<cudaError_t>(injected);
  try {
    cuda_host::Executor& executor = Worker::executor();
    executor.set_options(options);
    executor.launch(shape, thread);
  } catch (const std::exception& problem) {
    return complain(cudaErrorLaunchFailure, problem.what());
  }
  return cudaSuccess;
}

cudaError_t enqueue_kernel(Stream& stream, const cuda_host::LaunchShape& shape,
                           std::function<void()> thread) {
  if (stream.device != current_device()) {
    return refuse(cudaErrorInvalidResourceHandle, "launch: a stream of device ", stream.device,
                  " while device ", current_device(), " is current");
  }
  cuda_host::Options options = kernel_options();
  options.max_shared_bytes = machine().shared_bytes_per_block;
  try {
    cuda_host::check_launch(shape, options.max_shared_bytes);
  } catch (const InvalidArgument& problem) {
    return complain(cudaErrorInvalidConfiguration, problem.what());
  }
  return enqueue(stream, "kernel", [shape, thread = std::move(thread), options] {
    return run_kernel(shape, thread, options);
  });
}

}  // namespace

Stream::Stream(int stream_device, unsigned stream_flags, int stream_priority)
    : device(stream_device),
      flags(stream_flags),
      priority(stream_priority),
      worker(std::make_shared<Worker>()) {}

void Stream::launch(const cuda_host::LaunchShape& shape, std::function<void()> thread) {
  static Api& api = Api::named("cudaLaunchKernelEx");
  const cudaError_t error =
      api.call([&] { return enqueue_kernel(*this, shape, std::move(thread)); });
  require<InternalError>(error == cudaSuccess, "cudaLaunchKernelEx: ", cudaGetErrorString(error));
}

Completion* Completion::make() {
  constexpr std::size_t kChunk = 256;
  struct Chunks {
    std::mutex mutex;
    std::vector<std::unique_ptr<Completion[]>> all;
  };
  static auto* const chunks = new Chunks;
  thread_local Completion* next = nullptr;
  thread_local std::size_t num_left = 0;
  if (num_left == 0) {
    const std::lock_guard lock(chunks->mutex);
    next = chunks->all.emplace_back(new Completion[kChunk]).get();
    num_left = kChunk;
  }
  --num_left;
  return next++;
}

Stream* make_stream(int device, unsigned flags, int priority) {
  auto* stream = new Stream(device, flags, priority);
  add(counts().streams, 1);
  const std::lock_guard lock(streams.mutex);
  streams.all.insert(stream);
  return stream;
}

void destroy_stream(Stream& stream) {
  leave_capture(stream);
  {
    const std::lock_guard lock(streams.mutex);
    streams.all.erase(&stream);
  }
  delete &stream;
  add(counts().streams, -1);
}

Stream* stream_of(cudaStream_t handle, const char* api, cudaError_t* error) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    *error = check_unsafe_call(api, cudaErrorStreamCaptureImplicit);
    const bool is_legacy = handle != cudaStreamPerThread;
    if (*error == cudaSuccess && is_legacy && machine().has_default_stream)
      return default_stream(current_device());
    if (*error == cudaSuccess) {
      *error = refuse(cudaErrorInvalidResourceHandle, api, ": on a default stream");
    }
    return nullptr;
  }
  // An Executor is a stream to launch(), but not to the runtime.
  auto* stream = dynamic_cast<Stream*>(handle);
  if (stream == nullptr) *error = refuse(cudaErrorInvalidResourceHandle, api, ": not a stream");
  return stream;
}

cudaError_t enqueue(Stream& stream, const char* name, Operation operation) {
  if (stream.is_capturing()) return capture_operation(stream, name, std::move(operation));
  stream.worker->push(
      [device = stream.device, operation = std::move(operation)] { perform(device, operation); });
  return cudaSuccess;
}

cudaError_t run_in_stream(cudaStream_t handle, std::function<void()> work) {
  return Api::finish(with_stream(handle, "run_in_stream", [&](Stream& stream) {
    return enqueue(stream, "a test's work", [work = std::move(work)] {
      work();
      return cudaSuccess;
    });
  }));
}

void perform(int device, const Operation& operation) {
  Worker::delay();
  current_device() = device;
  if (sticky_error(device) != cudaSuccess) return;
  const cudaError_t error = operation();
  if (error != cudaSuccess) set_sticky_error(device, error);
}

void wait_for_streams(int device, bool only_blocking) {
  std::vector<std::shared_ptr<Worker>> workers;
  {
    const std::lock_guard lock(streams.mutex);
    for (const Stream* stream : streams.all) {
      const bool is_blocking = (stream->flags & cudaStreamNonBlocking) == 0;
      if (stream->device == device && (is_blocking || !only_blocking)) {
        workers.push_back(stream->worker);
      }
    }
  }
  for (const std::shared_ptr<Worker>& worker : workers) worker->wait();
}

}  // namespace cpattn::fake_cuda
