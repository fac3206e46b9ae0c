#include "kernels/cuda/backward_dq_sm80.cuh"

#include "kernels/cuda/backward_launch_sm80.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::sm80_gradient {

int own_rows(const AttentionShape& shape) {
  return with_config<SoundConfig>(shape, DType::bf16, [](auto config) { return config.kOwnRows; });
}

void launch_dq(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  with_config<SoundConfig>(shape, args.problem.dtype, [&](auto config) {
    using C = decltype(config);
    const unsigned blocks = num_blocks(args, args.q_blocks, C::kOwnRows, shape.num_heads,
                                       [](const QueryBlock& block) { return block.num_rows; });
    if (blocks == 0) return;
    launch(dq_kernel<C>, dim3(blocks), dim3(C::kThreads), shared_bytes<C>(params),
           static_cast<cudaStream_t>(args.stream.handle), params);
  });
}

LaunchTiles dq_tiles(const AttentionShape& shape) {
  BackwardParams params;
  params.qk_panels = num_panels(shape.head_dim);
  params.v_panels = num_panels(shape.value_dim);
  return with_config<SoundConfig>(shape, DType::bf16, [&](auto config) {
    using C = decltype(config);
    return LaunchTiles{"dq", C::kOwnRows, C::kSliceRows, C::kThreads, shared_bytes<C>(params)};
  });
}

}  // namespace cpattn::cuda::sm80_gradient
