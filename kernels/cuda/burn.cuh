// The kernels of burn.h for sm_80 and later.
#pragma once

#include "kernels/cuda/burn_operands.h"

namespace cpattn::cuda {

inline constexpr int kBurnThreads = 256;
/// Products that wait for no other one: twice what a warp needs to keep its unit busy.
inline constexpr int kBurnChains = 8;
inline constexpr double kBurnFlopPerProduct = 2.0 * 16 * 8 * 16;

template <class T>
__global__ void __launch_bounds__(kBurnThreads)
    burn_products_kernel(std::int64_t rounds, float* result) {
  std::uint32_t a[4], b[2];
  CP_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) a[i] = burn_pair<T>(threadIdx.x * 4 + i);
  CP_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) b[i] = burn_pair<T>(threadIdx.x * 2 + i);
  float sums[kBurnChains][4] = {};
  for (std::int64_t round = 0; round < rounds; ++round) {
    CP_UNROLL
    for (int i = 0; i < kBurnChains; ++i) ptx::multiply(sums[i], a, b[0], b[1], T{});
  }
  float chains[kBurnChains];
  CP_UNROLL
  for (int i = 0; i < kBurnChains; ++i)
    chains[i] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
  keep_sums(chains, result);
}

}  // namespace cpattn::cuda
