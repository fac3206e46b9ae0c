#include "kernels/cuda/forward_sm80.h"

#include <algorithm>

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/forward_sm80.cuh"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm80 {
namespace {

/// Calls visit(Config) with the one for these head sizes.
template <class T, class Visit>
auto with_config(const AttentionShape& shape, const Visit& visit) {
  const int panels = num_panels(std::max(shape.head_dim, shape.value_dim));
  if (panels == 1) return visit(Config<T, 1>{});
  if (panels == 2) return visit(Config<T, 2>{});
  return visit(Config<T, 4>{});
}

int tile_rows(const AttentionShape& shape) {
  return with_config<bf16>(shape, [](auto config) { return config.kTileRows; });
}

template <class T>
void forward_of(const ForwardArgs& args) {
  with_config<T>(args.problem.shape, [&](auto config) {
    using C = decltype(config);
    const unsigned blocks = forward_blocks(args, C::kTileRows);
    if (blocks == 0) return;
    const ForwardParams params = forward_params(args, C::kTileRows);
    launch(forward_kernel<C>, dim3(blocks), dim3(kThreads), shared_bytes<C>(params.form),
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

}  // namespace

std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
  return forward_workspace_bytes(problem, limits, tile_rows(problem.shape));
}

std::vector<std::byte> step_image(const ForwardArgs& args) {
  return make_step_image(args, tile_rows(args.problem.shape));
}

LaunchTiles launch_tiles(const AttentionShape& shape) {
  return with_config<bf16>(shape, [&](auto config) {
    using C = decltype(config);
    const KvForm form{num_panels(shape.head_dim), num_panels(shape.value_dim)};
    return LaunchTiles{"out", C::kTileRows, kTileRows, kThreads, shared_bytes<C>(form)};
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

}  // namespace cpattn::cuda::sm80
