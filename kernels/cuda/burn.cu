#include "kernels/cuda/burn.h"

#include "kernels/cuda/burn.cuh"
#include "kernels/cuda/launch.h"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

constexpr int kBurnSums = 16;

__global__ void __launch_bounds__(kBurnThreads)
    burn_sums_kernel(std::int64_t rounds, float* result) {
  const float factor = burn_number(threadIdx.x), term = burn_number(threadIdx.x + kBurnThreads);
  float sums[kBurnSums];
  CP_UNROLL
  for (int i = 0; i < kBurnSums; ++i) sums[i] = static_cast<float>(i);
  for (std::int64_t round = 0; round < rounds; ++round) {
    CP_UNROLL
    for (int i = 0; i < kBurnSums; ++i) sums[i] = fmaf(sums[i], factor, term);
  }
  keep_sums(sums, result);
}

}  // namespace

double burn(const BurnArgs& args) {
  const dim3 grid(narrow<unsigned>(args.num_workers)), block(kBurnThreads);
  const auto stream = static_cast<cudaStream_t>(args.stream.handle);
  const double rounds = static_cast<double>(args.rounds) * args.num_workers;
  float* const no_result = nullptr;
  if (args.dtype == DType::f32) {
    launch(burn_sums_kernel, grid, block, 0, stream, args.rounds, no_result);
    return rounds * kBurnThreads * kBurnSums * 2.0;
  }
  const auto kernel =
      args.dtype == DType::bf16 ? burn_products_kernel<bf16> : burn_products_kernel<f16>;
  launch(kernel, grid, block, 0, stream, args.rounds, no_result);
  return rounds * (kBurnThreads / 32) * kBurnChains * kBurnFlopPerProduct;
}

}  // namespace cpattn::cuda
