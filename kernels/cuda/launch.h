// launch(): the one way to start a kernel.
//
// Arguments are copied when it is called; the kernel runs when its stream gets to it. More than 48
// KiB of dynamic shared memory are asked for here, so no caller has to know.
#pragma once

#include <tuple>
#include <utility>

#include "kernels/cuda/compat.h"
#include "src/base/error.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/host/stream.h"
#endif

namespace cpattn::cuda {

#if defined(__CUDACC__)

inline void check(cudaError_t status, const char* what) {
  require<InternalError>(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute(dynamic shared memory)");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "cudaLaunchKernelEx");
}

#else

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  stream->launch({{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes},
                 [kernel, copies = std::tuple<Params...>(static_cast<Params>(args)...)] {
                   std::apply(kernel, copies);
                 });
}

#endif

}  // namespace cpattn::cuda
