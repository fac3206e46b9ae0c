#include "kernels/cuda/backward_dq_sm90.cuh"

#include "kernels/cuda/backward_launch_sm90.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm90_gradient {

void launch_dq(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  const unsigned blocks = num_blocks(args, args.q_blocks, kOwnRows, shape.num_heads,
                                     [](const QueryBlock& block) { return block.num_rows; });
  if (blocks == 0) return;
  with_config<SoundConfig>(shape, args.problem.dtype, [&](auto config) {
    using C = decltype(config);
    launch(dq_kernel<C>, dim3(blocks), dim3(kThreads), SharedPlan<C>::kBytes,
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

LaunchTiles dq_tiles(const AttentionShape& shape) {
  return with_config<SoundConfig>(shape, DType::bf16, [](auto config) {
    using C = decltype(config);
    return LaunchTiles{"dq", kOwnRows, kTileRows, kThreads, SharedPlan<C>::kBytes};
  });
}

}  // namespace cpattn::cuda::sm90_gradient
