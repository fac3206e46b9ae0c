#include "kernels/cuda/forward_sm90.h"

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/forward_sm90.cuh"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm90 {
namespace {

/// Calls visit(Config) with the one for these head sizes.
template <class T, class Visit>
auto with_config(const AttentionShape& shape, const Visit& visit) {
  const int k_panels = num_panels(shape.head_dim), v_panels = num_panels(shape.value_dim);
  if (k_panels == 1 && v_panels == 1) return visit(Config<T, 1, 1, 2>{});
  if (k_panels <= 2 && v_panels <= 2) return visit(Config<T, 2, 2, 2>{});
  if (k_panels <= 3 && v_panels <= 2) return visit(Config<T, 3, 2, 1>{});
  return visit(Config<T, 4, 4, 1>{});
}

template <class T>
void forward_of(const ForwardArgs& args) {
  const unsigned blocks = forward_blocks(args, kRowTile);
  if (blocks == 0) return;
  const ForwardParams params = forward_params(args, kRowTile);
  with_config<T>(args.problem.shape, [&](auto config) {
    using C = decltype(config);
    launch(forward_kernel<C>, dim3(blocks), dim3(kThreads), SharedPlan<C>::kBytes,
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

}  // namespace

std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
  return forward_workspace_bytes(problem, limits, kRowTile);
}

std::vector<std::byte> step_image(const ForwardArgs& args) {
  return make_step_image(args, kRowTile);
}

LaunchTiles launch_tiles(const AttentionShape& shape) {
  return with_config<bf16>(shape, [](auto config) {
    using C = decltype(config);
    return LaunchTiles{"out", kRowTile, C::kStepKeys, kThreads, SharedPlan<C>::kBytes};
  });
}

void forward(const ForwardArgs& args) {
  check_forward(args);
  if (args.problem.dtype == DType::bf16) {
    forward_of<bf16>(args);
  } else {
    forward_of<f16>(args);
  }
}

}  // namespace cpattn::cuda::sm90
