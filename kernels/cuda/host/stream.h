// The launch seam's host half: what a kernel is handed to.
//
// The names are those the CUDA runtime's headers use (cudaStream_t is a pointer to the hidden
// CUstream_st), so that a source may include those headers as well. Who implements the stream says
// when the kernel runs: an Executor at once, a runtime's double in its own thread.
#pragma once

#include <cstddef>
#include <functional>

namespace cpattn::cuda_host {

/// Same layout as dim3, which belongs to the language of kernels.
struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchShape {
  Index3 grid;
  Index3 block;
  std::size_t shared_bytes = 0;  ///< dynamic
};

}  // namespace cpattn::cuda_host

struct CUstream_st {
  virtual ~CUstream_st() = default;
  /// `thread` is what every CUDA thread of the grid does; it owns copies of the kernel's arguments.
  virtual void launch(const cpattn::cuda_host::LaunchShape& shape,
                      std::function<void()> thread) = 0;
};
using cudaStream_t = CUstream_st*;
