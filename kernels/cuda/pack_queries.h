// Shards to packed q chunks of 16-bit elements (tile_form.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_gradient.h"

namespace cpattn::cuda {

/// Bytes of a packed q chunk of `num_rows` rows.
std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows);

/// GradientKernels::pack_queries. dout is rounded to the type of q, and delta is computed from what
/// it was rounded to, so that sum_j p_ij (dout_i.v_j - delta_i) cancels as it should. In a tile,
/// lse is in units of log2. Surplus rows, and rows that saw no key (lse = -inf), hold zeros, and
/// lse = -inf. Chunks are parameters of launches, many to each, so it can be captured.
void pack_queries(const PackQueriesArgs& args);

}  // namespace cpattn::cuda
