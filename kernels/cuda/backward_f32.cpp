#include "kernels/cuda/backward_f32.h"

#include "kernels/cuda/check_gradient.h"

namespace cpattn::cuda::f32 {

std::size_t gradient_workspace_bytes(const KernelProblem& /*problem*/,
                                     const GradientLimits& /*limits*/) {
  return 0;
}

std::vector<LaunchTiles> gradient_tiles(const AttentionShape& shape) {
  return {dkv_tiles(shape), dq_tiles(shape)};
}

std::vector<std::byte> gradient_image(const BackwardArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  return make_gradient_image(args, {.rows = row_tile_size(shape), .keys = key_tile_size(shape)});
}

void backward(const BackwardArgs& args) {
  check_backward(args);
  if (args.tasks.empty()) return;
  const BackwardParams params = backward_params(args);
  launch_dkv(args, params);
  launch_dq(args, params);
}

}  // namespace cpattn::cuda::f32
