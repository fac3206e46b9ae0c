#include "kernels/cuda/backward_sm80.h"

#include "kernels/cuda/backward_launch_sm80.h"
#include "kernels/cuda/check_gradient.h"

namespace cpattn::cuda::sm80_gradient {

std::size_t workspace_bytes(const KernelProblem& /*problem*/, const GradientLimits& /*limits*/) {
  return 0;
}

std::vector<std::byte> step_image(const BackwardArgs& args) {
  const int rows = own_rows(args.problem.shape);
  return make_gradient_image(args, {.rows = rows, .keys = rows});
}

std::vector<LaunchTiles> launch_tiles(const AttentionShape& shape) {
  std::vector<LaunchTiles> tiles = dkv_tiles(shape);
  tiles.push_back(dq_tiles(shape));
  return tiles;
}

void backward(const BackwardArgs& args) {
  check_backward(args);
  if (args.tasks.empty()) return;
  const BackwardParams params = backward_params(args);
  launch_dkv(args, params);
  launch_dq(args, params);
}

}  // namespace cpattn::cuda::sm80_gradient
