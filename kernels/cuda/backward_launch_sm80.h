// The launches of backward_sm80.h, each in a source of its own, since their kernels take nvcc long.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cuda/backward_params.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::sm80_gradient {

void launch_dkv(const BackwardArgs& args, const BackwardParams& params);
void launch_dq(const BackwardArgs& args, const BackwardParams& params);
std::vector<LaunchTiles> dkv_tiles(const AttentionShape& shape);
LaunchTiles dq_tiles(const AttentionShape& shape);

/// Rows that a thread block owns: the size of tiles.
int own_rows(const AttentionShape& shape);

/// Calls visit(Config) with the one for a problem; `Config` is that of backward_tile_sm80.cuh.
template <template <class, int> class Config, class Visit>
auto with_config(const AttentionShape& shape, DType dtype, const Visit& visit) {
  const bool is_wide = num_panels(std::max(shape.head_dim, shape.value_dim)) > 2;
  if (dtype == DType::bf16) return is_wide ? visit(Config<bf16, 4>{}) : visit(Config<bf16, 2>{});
  return is_wide ? visit(Config<f16, 4>{}) : visit(Config<f16, 2>{});
}

}  // namespace cpattn::cuda::sm80_gradient
