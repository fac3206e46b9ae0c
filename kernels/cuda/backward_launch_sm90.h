// The launches of backward_sm90.h, each in a source of its own, since their kernels take nvcc long.
#pragma once

#include <algorithm>

#include "kernels/cuda/backward_params.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::sm90_gradient {

/// Rows or keys that a thread block owns: the size of tiles.
inline constexpr int kOwnRows = 128;

void launch_dkv(const BackwardArgs& args, const BackwardParams& params);
void launch_dq(const BackwardArgs& args, const BackwardParams& params);
LaunchTiles dkv_tiles(const AttentionShape& shape);
LaunchTiles dq_tiles(const AttentionShape& shape);

/// Calls visit(Config) with the one for a problem; `Config` is that of backward_ring_sm90.h.
template <template <class, int> class Config, class Visit>
auto with_config(const AttentionShape& shape, DType dtype, const Visit& visit) {
  const bool is_narrow = num_panels(std::max(shape.head_dim, shape.value_dim)) == 1;
  if (dtype == DType::bf16) return is_narrow ? visit(Config<bf16, 1>{}) : visit(Config<bf16, 2>{});
  return is_narrow ? visit(Config<f16, 1>{}) : visit(Config<f16, 2>{});
}

}  // namespace cpattn::cuda::sm90_gradient
