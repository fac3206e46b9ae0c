// The launches of backward_sm80.h, each in a source of its own, since their kernels take nvcc long.
#pragma once

#include <algorithm>

#include "kernels/cuda/backward_params.h"
#include "src/base/integers.h"

namespace cpattn::cuda::sm80_gradient {

void launch_dkv(const BackwardArgs& args, const BackwardParams& params);
void launch_dq(const BackwardArgs& args, const BackwardParams& params);

/// Rows that a thread block owns: the size of tiles.
int own_rows(const AttentionShape& shape);

/// As many thread blocks as work at a time, or fewer if there is less to do.
template <class Chunks, class Length>
unsigned num_blocks(const BackwardArgs& args, const Chunks& chunks, int tile, std::int64_t heads,
                    const Length& length) {
  std::int64_t tiles = 0;
  for (const auto& chunk : chunks) tiles += ceil_div(length(chunk), std::int64_t{tile});
  return narrow<unsigned>(std::min<std::int64_t>(tiles * heads, args.problem.num_threads));
}

/// Calls visit(Config) with the one for a problem; `Config` is that of backward_tile_sm80.cuh.
template <template <class, int> class Config, class Visit>
auto with_config(const AttentionShape& shape, DType dtype, const Visit& visit) {
  const bool is_wide = num_panels(std::max(shape.head_dim, shape.value_dim)) > 2;
  if (dtype == DType::bf16) return is_wide ? visit(Config<bf16, 4>{}) : visit(Config<bf16, 2>{});
  return is_wide ? visit(Config<f16, 4>{}) : visit(Config<f16, 2>{});
}

}  // namespace cpattn::cuda::sm80_gradient
