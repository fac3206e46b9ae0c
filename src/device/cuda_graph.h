// CudaGraph: what was put into a stream, recorded once and launched as one piece.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "src/device/cuda_handles.h"

namespace cpattn {

class CudaGraph {
 public:
  /// Calls `work`, which puts work into `stream` (and into streams that join it again) and waits
  /// for nothing. Of the current device.
  /// Errors  DeviceError: something in `work` cannot be captured; what `work` throws. The stream is
  ///         as it was then.
  CudaGraph(cudaStream_t stream, const std::function<void()>& work) {
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
    try {
      work();
    } catch (...) {
      end_capture(stream);
      throw;
    }
    const Recorded recorded = end_capture(stream);
    cuda_check(recorded.status, "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    cuda_check(cudaGraphInstantiate(&executable, recorded.graph.get(), 0), "cudaGraphInstantiate");
    executable_ = CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy>(executable);
  }

  /// Once more, in the order of `stream`.
  void replay(cudaStream_t stream) const {
    cuda_check(cudaGraphLaunch(executable_.get(), stream), "cudaGraphLaunch");
  }

 private:
  struct Recorded {
    CudaHandle<cudaGraph_t, cudaGraphDestroy> graph;
    cudaError_t status = cudaSuccess;
  };

  static Recorded end_capture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status != cudaSuccess) cudaGetLastError();
    return {CudaHandle<cudaGraph_t, cudaGraphDestroy>(graph), status};
  }

  CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy> executable_;
};

}  // namespace cpattn
