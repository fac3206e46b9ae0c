#include "kernels/cuda/backward_dkv_sm80.cuh"

#include "kernels/cuda/backward_launch_sm80.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm80_gradient {

void launch_dkv(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  with_config<SoundConfig>(shape, args.problem.dtype, [&](auto config) {
    using C = decltype(config);
    const unsigned blocks = num_blocks(args, args.kv_blocks, C::kOwnRows, shape.num_kv_heads,
                                       [](const KvBlock& block) { return block.num_keys; });
    if (blocks == 0) return;
    const auto start = [&](auto* kernel) {
      launch(kernel, dim3(blocks), dim3(C::kThreads), shared_bytes<C>(params),
             static_cast<cudaStream_t>(args.stream.handle), params);
    };
    if constexpr (C::kPanels <= 2) {
      start(dkv_kernel<C, DkvPart::both>);
    } else {
      start(dkv_kernel<C, DkvPart::dk>);
      start(dkv_kernel<C, DkvPart::dv>);
    }
  });
}

std::vector<LaunchTiles> dkv_tiles(const AttentionShape& shape) {
  LaunchTiles tiles = dq_tiles(shape);  // the same but for what they compute
  tiles.result = "dk, dv";
  if (with_config<SoundConfig>(shape, DType::bf16, [](auto config) { return config.kPanels <= 2; }))
    return {tiles};
  tiles.result = "dk";
  LaunchTiles others = tiles;
  others.result = "dv";
  return {tiles, others};
}

}  // namespace cpattn::cuda::sm80_gradient
