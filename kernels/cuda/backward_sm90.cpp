#include "kernels/cuda/backward_sm90.h"

#include "kernels/cuda/backward_launch_sm90.h"
#include "kernels/cuda/check_gradient.h"

namespace cpattn::cuda::sm90_gradient {
namespace {

constexpr int kMaxPanels = 2;

}  // namespace

bool takes(const AttentionShape& shape) {
  return num_panels(std::max(shape.head_dim, shape.value_dim)) <= kMaxPanels;
}

std::vector<LaunchTiles> launch_tiles(const AttentionShape& shape) {
  return {dkv_tiles(shape), dq_tiles(shape)};
}

std::vector<std::byte> step_image(const BackwardArgs& args) {
  return make_gradient_image(args, {.rows = kOwnRows, .keys = kOwnRows});
}

void backward(const BackwardArgs& args) {
  check_backward(args);
  if (args.tasks.empty()) return;
  const BackwardParams params = backward_params(args);
  launch_dkv(args, params);
  launch_dq(args, params);
}

}  // namespace cpattn::cuda::sm90_gradient
