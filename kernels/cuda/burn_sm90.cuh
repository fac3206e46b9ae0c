// The kernel of burn.h for Hopper.
#pragma once

#include "kernels/cuda/burn_operands.h"
#include "kernels/cuda/ptx_sm90.h"

namespace cpattn::cuda::sm90 {

inline constexpr int kBurnThreads = 256;  // two warpgroups, which take turns at the tensor cores
inline constexpr int kBurnN = 256;
inline constexpr int kBurnDepth = 64;  // channels of both tiles: a row is as wide as the swizzle
inline constexpr unsigned kBurnRowBytes = kBurnDepth * 2;
inline constexpr unsigned kBurnATileBytes = 64 * kBurnRowBytes;
inline constexpr unsigned kBurnSharedBytes = kBurnATileBytes + kBurnN * kBurnRowBytes;
inline constexpr double kBurnFlopPerRound = 2.0 * 64 * kBurnN * kBurnDepth;  // of a warpgroup

template <class T>
__global__ void __launch_bounds__(kBurnThreads, 1)
    burn_products_kernel(std::int64_t rounds, float* result) {
  CP_DYNAMIC_SMEM(tiles);
  for (unsigned i = threadIdx.x; i < kBurnSharedBytes / 4; i += kBurnThreads)
    reinterpret_cast<std::uint32_t*>(tiles)[i] = burn_pair<T>(i);
  ptx::fence_async_proxy();
  __syncthreads();
  const ptx::SharedAddress a = ptx::shared_address(tiles), b = a + kBurnATileBytes;
  constexpr unsigned kEightRows = 8 * kBurnRowBytes;
  float sums[kBurnN / 2];
  CP_UNROLL
  for (int i = 0; i < kBurnN / 2; ++i) sums[i] = 0.0f;
  ptx::hold_registers(sums);
  for (std::int64_t round = 0; round < rounds; ++round) {
    ptx::products_fence();
    CP_UNROLL
    for (unsigned k = 0; k < kBurnRowBytes; k += 32) {
      ptx::start_product<kBurnN, false, false>(
          sums, ptx::matrix_descriptor(a + k, 0, kEightRows, Swizzle::bytes128),
          ptx::matrix_descriptor(b + k, 0, kEightRows, Swizzle::bytes128), true, T{});
    }
    ptx::commit_products();
    ptx::wait_products<1>();
  }
  ptx::wait_products<0>();
  ptx::hold_registers(sums);
  keep_sums(sums, result);
}

}  // namespace cpattn::cuda::sm90
