// How large the logits are that carry weight, measured on a few rows of every head of every chunk:
// what error_bound.h scales the allowance of large logits by.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/reference/attention.h"

namespace cpattn {

/// For each (chunk, head): the root mean square, over up to 8 of the chunk's rows, of
/// sum_j p_j |s_j|, where p_j are the exact weights and s_j the scaled logits of a row.
///
/// Shapes  chunk_of_row, visible_keys: one entry per entry of args.rows; lse [rows, heads], exact;
///         the result [num_chunks, heads].
/// Cost    8 rows of q.k per group, in double.
std::vector<double> logit_magnitudes(const reference::AttentionArgs& args,
                                     std::span<const double> lse,
                                     std::span<const std::int32_t> chunk_of_row,
                                     std::span<const std::int64_t> visible_keys,
                                     std::int32_t num_chunks);

}  // namespace cpattn
