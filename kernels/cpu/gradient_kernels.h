// The backward half of the seam between the instruction-set sources and the rest of the CPU backend
// (tile_kernels.h), and the memory layouts both sides agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_gradient.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

/// Channels of a row-major row: whole vectors of every instruction set.
constexpr std::int64_t padded_dim(std::int64_t dim) { return (dim + 15) / 16 * 16; }

/// One packed tile of 48 query rows of one head, as float offsets. What is multiplied as lanes lies
/// [channel][row], what is multiplied as rows [row][channel]. Surplus rows and channels hold zeros,
/// and so do rows that saw no key.
struct QueryTileLayout {
  std::int64_t q_lanes = 0;     ///< [D][48], with the sign of the scale (score_scale)
  std::int64_t q_rows = 0;      ///< [48][padded D], as the caller has it
  std::int64_t dout_lanes = 0;  ///< [Dv in whole panels][48]
  std::int64_t dout_rows = 0;   ///< [48][padded Dv]
  std::int64_t lse = 0;         ///< [48], in units of log2; -inf for a row that saw no key
  std::int64_t delta = 0;       ///< [48]
  std::int64_t specials = 0;    ///< one number: not 0 when q or dout holds an infinity or a NaN
  std::int64_t total = 0;
};

constexpr QueryTileLayout query_tile_layout(const AttentionShape& shape) {
  QueryTileLayout layout;
  layout.q_rows = layout.q_lanes + shape.head_dim * kQueryTile;
  layout.dout_lanes = layout.q_rows + kQueryTile * padded_dim(shape.head_dim);
  layout.dout_rows = layout.dout_lanes + panels(shape.value_dim) * kPanel * kQueryTile;
  layout.lse = layout.dout_rows + kQueryTile * padded_dim(shape.value_dim);
  layout.delta = layout.lse + kQueryTile;
  layout.specials = layout.delta + kQueryTile;
  layout.total = layout.specials + 16;
  return layout;
}

/// A key's row of a dk, dv leaf: [dk, padded D][dv, padded Dv].
constexpr std::int64_t dkv_row_floats(const AttentionShape& shape) {
  return padded_dim(shape.head_dim) + padded_dim(shape.value_dim);
}

/// dq of one tile of one head: [D][48].
constexpr std::int64_t dq_tile_floats(const AttentionShape& shape) {
  return shape.head_dim * kQueryTile;
}

/// Rows of one head, as the caller has them.
struct StridedRows {
  const std::byte* data = nullptr;
  std::int64_t row_bytes = 0;
  DType dtype = DType::f32;
};

/// One tile of one head into its packed form.
struct QueryTileJob {
  const AttentionShape* shape = nullptr;
  std::int64_t num_rows = 0;  ///< 1 .. 48
  StridedRows q, out, dout;
  const float* lse = nullptr;
  std::int64_t lse_stride = 0;
  const float* dlse = nullptr;  ///< or nullptr: zeros
  std::int64_t dlse_stride = 0;
  float* packed = nullptr;
};

/// The gradients of one query tile x one kv block x one query head.
struct GradientJob {
  const AttentionShape* shape = nullptr;
  BlockMask mask;
  std::int64_t first_row = 0;      ///< of the tile within its q chunk
  std::int64_t num_rows = 0;       ///< 1 .. 48
  const float* queries = nullptr;  ///< the packed tile
  const float* k = nullptr;        ///< panels of this kv head
  const float* v = nullptr;
  std::int64_t num_keys = 0;
  float* dq = nullptr;   ///< added to: [D][48]
  float* dkv = nullptr;  ///< added to: [key][dkv_row_floats]
  ProgressHook progress;
};

/// Memory of one thread for run_gradient, 64-byte aligned.
struct GradientScratch {
  float* weights = nullptr;  ///< [kKeyTile][48]: scores, then p
  float* slopes = nullptr;   ///< [kKeyTile][48]: dout.v, then ds
};

/// Where finished gradients of one head go: rows of `dim` elements, each scaled and rounded once.
struct FinishedRows {
  std::byte* data = nullptr;
  std::int64_t row_bytes = 0;
  DType dtype = DType::f32;
  std::int64_t num_rows = 0;
  std::int64_t dim = 0;
  float scale = 1.0f;
};

struct GradientTileKernels {
  void (*pack_query_tile)(const QueryTileJob& job) = nullptr;
  void (*run_gradient)(const GradientJob& job, const GradientScratch& scratch) = nullptr;
  /// dst = left + right, `count` floats, a multiple of 16; dst may be either.
  void (*add)(const float* left, const float* right, std::int64_t count, float* dst) = nullptr;
  /// From lanes [dim][48].
  void (*finish_lanes)(const float* lanes, const FinishedRows& to) = nullptr;
  /// From rows, `row_floats` apart.
  void (*finish_rows)(const float* rows, std::int64_t row_floats, const FinishedRows& to) = nullptr;
};

}  // namespace cpattn::cpu
