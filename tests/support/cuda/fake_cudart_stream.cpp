// The runtime's functions of streams.
#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_cuda;

namespace {

cudaError_t create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  if (machine().num_devices == 0) return refuse(cudaErrorNoDevice, "no device");
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) {
    return refuse(cudaErrorInvalidValue, "cudaStreamCreate: flags ", flags);
  }
  *handle = make_stream(current_device(), flags, priority);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return create_stream(handle, cudaStreamDefault, 0); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return create_stream(handle, flags, 0); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return create_stream(handle, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Api::named(__func__).enter();  // must work after any error, so that everything can be given back
  return with_stream(handle, __func__, [](Stream& stream) {
    destroy_stream(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamSynchronize", [](Stream& stream) {
      if (stream.is_capturing()) return refuse_in_capture(stream, "cudaStreamSynchronize");
      const cudaError_t error = check_unsafe_call("cudaStreamSynchronize");
      if (error != cudaSuccess) return error;
      stream.worker->wait();
      return sticky_error(stream.device);
    });
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamQuery", [](Stream& stream) {
      if (stream.is_capturing()) return refuse_in_capture(stream, "cudaStreamQuery");
      const cudaError_t error = check_unsafe_call("cudaStreamQuery");
      if (error != cudaSuccess) return error;
      return stream.worker->is_idle() ? sticky_error(stream.device) : cudaErrorNotReady;
    });
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamGetFlags", [&](const Stream& stream) {
      *flags = stream.flags;
      return cudaSuccess;
    });
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamGetPriority", [&](const Stream& stream) {
      *priority = stream.priority;
      return cudaSuccess;
    });
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamGetDevice", [&](const Stream& stream) {
      *device = stream.device;
      return cudaSuccess;
    });
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaLaunchHostFunc", [&](Stream& stream) {
      return enqueue(stream, "host function", [function, argument] {
        function(argument);
        return cudaSuccess;
      });
    });
  });
}

cudaError_t cudaDeviceSynchronize() {
  static Api& api = Api::named(__func__);
  return api.call([] {
    const cudaError_t error = check_unsafe_call("cudaDeviceSynchronize");
    if (error != cudaSuccess) return error;
    wait_for_streams(current_device(), false);
    return sticky_error(current_device());
  });
}
