// The packed form of the f32 CUDA kernels: rows as they are, one after the other.
//
//   packed kv chunk, dkv slot    for each kv head: k (dk) [keys][D], v (dv) [keys][Dv]
//   packed q chunk               q [heads][rows][D], dout [heads][rows][Dv], lse [heads][rows] in
//                                units of log2, delta [heads][rows]
//   dq slot                      [heads][rows of the longest chunk][D]
//
// Rows are filled up with zeros to whole 16 bytes, so kernels read four channels at once and guard
// rows only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/compat.h"
#include "kernels/shape.h"

namespace cpattn::cuda::f32 {

/// Of packed chunks, and their sizes are multiples of it.
inline constexpr std::size_t kPackedAlignment = 64;

/// Floats of a row of `dim` channels: whole quads.
CP_SHARED_BY_HOST constexpr int row_floats(std::int64_t dim) {
  return static_cast<int>((dim + 3) / 4 * 4);
}

struct RowForm {
  int dim = 1;        ///< of k, q
  int value_dim = 1;  ///< of v, dout

  CP_SHARED_BY_HOST constexpr std::int64_t first_floats(std::int64_t rows) const {
    return rows * row_floats(dim);
  }
  CP_SHARED_BY_HOST constexpr std::int64_t second_floats(std::int64_t rows) const {
    return rows * row_floats(value_dim);
  }
  /// Of one head of a kv chunk.
  CP_SHARED_BY_HOST constexpr std::int64_t kv_floats(std::int64_t keys) const {
    return first_floats(keys) + second_floats(keys);
  }
};

/// Where the parts of a packed q chunk begin.
struct QueryParts {
  std::int64_t dout = 0;  ///< q begins at 0
  std::int64_t lse = 0;
  std::int64_t delta = 0;
  std::int64_t total = 0;
};

CP_SHARED_BY_HOST constexpr QueryParts query_parts(const RowForm& form, std::int64_t heads,
                                                   std::int64_t rows) {
  QueryParts parts;
  parts.dout = form.first_floats(heads * rows);
  parts.lse = parts.dout + form.second_floats(heads * rows);
  parts.delta = parts.lse + heads * rows;
  parts.total = parts.delta + heads * rows;
  return parts;
}

constexpr RowForm form_of(const AttentionShape& shape) {
  return {static_cast<int>(shape.head_dim), static_cast<int>(shape.value_dim)};
}

}  // namespace cpattn::cuda::f32
