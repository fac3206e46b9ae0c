#include "kernels/cuda/forward_f32.h"

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/forward_f32.cuh"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::f32 {
namespace {

int tile_rows(const AttentionShape& shape) {
  return with_groups(shape.value_dim, [](auto groups) { return kTileRows<groups>; });
}

}  // namespace

std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
  return forward_workspace_bytes(problem, limits, tile_rows(problem.shape));
}

std::vector<std::byte> step_image(const ForwardArgs& args) {
  return make_step_image(args, tile_rows(args.problem.shape));
}

LaunchTiles launch_tiles(const AttentionShape& shape) {
  return with_groups(shape.value_dim, [](auto groups) {
    return LaunchTiles{"out", kTileRows<groups>, static_cast<int>(kKeyTile), kThreads,
                       kForwardSharedBytes<groups>};
  });
}

void forward(const ForwardArgs& args) {
  check_forward(args);
  with_groups(args.problem.shape.value_dim, [&](auto groups) {
    const unsigned blocks = forward_blocks(args, kTileRows<groups>);
    if (blocks == 0) return;
    const ForwardF32Params params{forward_params(args, kTileRows<groups>),
                                  form_of(args.problem.shape)};
    launch(forward_kernel<groups>, dim3(blocks), dim3(kThreads), kForwardSharedBytes<groups>,
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

}  // namespace cpattn::cuda::f32
