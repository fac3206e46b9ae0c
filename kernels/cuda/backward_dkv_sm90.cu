#include "kernels/cuda/backward_dkv_sm90.cuh"

#include "kernels/cuda/backward_launch_sm90.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm90_gradient {

void launch_dkv(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  const unsigned blocks = num_blocks(args, args.kv_blocks, kOwnRows, shape.num_kv_heads,
                                     [](const KvBlock& block) { return block.num_keys; });
  if (blocks == 0) return;
  with_config<SoundConfig>(shape, args.problem.dtype, [&](auto config) {
    using C = decltype(config);
    launch(dkv_kernel<C>, dim3(blocks), dim3(kThreads), SharedPlan<C>::kBytes,
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

LaunchTiles dkv_tiles(const AttentionShape& shape) {
  return with_config<SoundConfig>(shape, DType::bf16, [](auto config) {
    using C = decltype(config);
    return LaunchTiles{"dk, dv", kOwnRows, kTileRows, kThreads, SharedPlan<C>::kBytes};
  });
}

}  // namespace cpattn::cuda::sm90_gradient
