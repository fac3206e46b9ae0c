// The one header through which device source sees CUDA: nvcc's, or the host layer that executes
// the same source on a CPU (docs/gpu_testing.md).
#pragma once

#if defined(__CUDACC__)

#include <cuda_runtime.h>

#define CP_PRAGMA(text) _Pragma(#text)
#define CP_UNROLL CP_PRAGMA(unroll)
#define CP_UNROLL_BY(count) CP_PRAGMA(unroll count)
/// `std::byte* name`: dynamic shared memory, the only kind kernels use.
#define CP_DYNAMIC_SMEM(name)                                    \
  extern __shared__ __align__(1024) unsigned char cp_dynamic_[]; \
  std::byte* const name = reinterpret_cast<std::byte*>(cp_dynamic_)

#else

#include "kernels/cuda/host/words.h"

#define CP_UNROLL
#define CP_UNROLL_BY(count)
#define CP_DYNAMIC_SMEM(name) std::byte* const name = ::cpattn::cuda_host::shared_begin()

#endif

#include <cstddef>
#include <cstdint>

/// A function of device code: small, in line, also callable where kernels run on the host.
#define CP_DEVICE __device__ __forceinline__
/// A member that both sides of a launch call.
#define CP_SHARED_BY_HOST __host__ __device__
/// A struct through which memory of any type is read.
#define CP_MAY_ALIAS __attribute__((may_alias))
