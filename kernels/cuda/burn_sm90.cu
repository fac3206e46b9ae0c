#include "kernels/cuda/burn_sm90.cuh"

#include "kernels/cuda/burn.h"
#include "kernels/cuda/launch.h"
#include "src/base/integers.h"

namespace cpattn::cuda::sm90 {

double burn(const BurnArgs& args) {
  const auto kernel =
      args.dtype == DType::bf16 ? burn_products_kernel<bf16> : burn_products_kernel<f16>;
  float* const no_result = nullptr;
  launch(kernel, dim3(narrow<unsigned>(args.num_workers)), dim3(kBurnThreads), kBurnSharedBytes,
         static_cast<cudaStream_t>(args.stream.handle), args.rounds, no_result);
  constexpr double kWarpgroups = kBurnThreads / 128.0;
  return static_cast<double>(args.rounds) * args.num_workers * kWarpgroups * kBurnFlopPerRound;
}

}  // namespace cpattn::cuda::sm90
