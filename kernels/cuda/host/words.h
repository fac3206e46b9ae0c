// The words of CUDA C++ for a compiler that does not know them, as far as our kernels use them.
//
// What is missing here is missing on purpose: static __shared__ (one copy for all blocks on the
// host; kernels carve CP_DYNAMIC_SMEM instead), __activemask (meaningless here), float atomics
// (their order is nobody's). atomicCAS is here for maxima, which have no order to depend on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/host/warp.h"

#if __has_include(<cuda_runtime.h>)
// The toolkit is in the include path: one dim3 for everybody, and here, before threadIdx and its
// like become macros, since the toolkit's headers have parameters of these names.
#include <cuda_runtime.h>
#else
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) [[gnu::may_alias]] float2 {
  float x, y;
};
struct alignas(16) [[gnu::may_alias]] float4 {
  float x, y, z, w;
};
struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __grid_constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (::cpattn::cuda_host::current_thread->thread_index)
#define blockIdx (::cpattn::cuda_host::current_thread->block_index)
#define blockDim (::cpattn::cuda_host::current_thread->block_dim)
#define gridDim (::cpattn::cuda_host::current_thread->grid_dim)

inline void __syncthreads() { cpattn::cuda_host::barrier_sync(0, 0, "__syncthreads"); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cpattn::cuda_host::sync_warp(mask); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return cpattn::cuda_host::shuffled(cpattn::cuda_host::ShuffleKind::index, mask, value, lane,
                                     width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cpattn::cuda_host::shuffled(cpattn::cuda_host::ShuffleKind::up, mask, value,
                                     static_cast<int>(delta), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return cpattn::cuda_host::shuffled(cpattn::cuda_host::ShuffleKind::down, mask, value,
                                     static_cast<int>(delta), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return cpattn::cuda_host::shuffled(cpattn::cuda_host::ShuffleKind::butterfly, mask, value,
                                     lane_mask, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cpattn::cuda_host::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate == 0 ? 1 : 0) == 0 ? 1 : 0;
}
inline void __nanosleep(unsigned) { cpattn::cuda_host::yield(); }

inline unsigned atomicCAS(unsigned* word, unsigned expected, unsigned desired) {
  __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
