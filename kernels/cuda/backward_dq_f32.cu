#include "kernels/cuda/backward_dq_f32.cuh"

#include "kernels/cuda/backward_f32.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::f32 {

int row_tile_size(const AttentionShape& shape) {
  return with_groups(shape.head_dim, [](auto groups) { return kTileRows<groups>; });
}

void launch_dq(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  with_groups(shape.head_dim, [&](auto groups) {
    using C = GradientConfig<groups>;
    const unsigned blocks = num_blocks(args, args.q_blocks, C::kOwnRows, shape.num_heads,
                                       [](const QueryBlock& block) { return block.num_rows; });
    if (blocks == 0) return;
    launch(dq_kernel<C>, dim3(blocks), dim3(kThreads), kDqSharedBytes<C>,
           static_cast<cudaStream_t>(args.stream.handle), f32_params(shape, params));
  });
}

LaunchTiles dq_tiles(const AttentionShape& shape) {
  return with_groups(shape.head_dim, [](auto groups) {
    using C = GradientConfig<groups>;
    return LaunchTiles{"dq", C::kOwnRows, static_cast<int>(kKeyTile), kThreads, kDqSharedBytes<C>};
  });
}

}  // namespace cpattn::cuda::f32
