// Shards to packed q chunks of f32 rows (f32_form.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_gradient.h"

namespace cpattn::cuda::f32 {

/// Bytes of a packed q chunk of `num_rows` rows.
std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows);

/// GradientKernels::pack_queries. dout is widened to f32, so delta is that of DeltaArgs (rows.h).
/// Rows that saw no key (lse = -inf) hold zeros, and lse = -inf. Chunks are parameters of launches,
/// many to each, so it can be captured.
void pack_queries(const PackQueriesArgs& args);

}  // namespace cpattn::cuda::f32
