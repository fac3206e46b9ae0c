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

/// Rows of the contracted dimension of dk and dv: bf16_pair multiplies two query rows at once.
constexpr std::int64_t rows_per_element(Engine engine) { return engine == Engine::f32 ? 1 : 2; }

/// One packed tile of 48 query rows of one head, as offsets of 4 bytes. What is multiplied as lanes
/// lies [step][row], what is multiplied as rows [row or pair of rows][channel]. Surplus rows and
/// channels hold zeros, and so do rows that saw no key.
struct QueryTileLayout {
  std::int64_t q_lanes = 0;     ///< [steps of D][48], with the sign of the scale (score_scale)
  std::int64_t q_rows = 0;      ///< [48 or 24][padded D], as the caller has it
  std::int64_t dout_lanes = 0;  ///< [steps of Dv, f32: in whole panels][48]
  std::int64_t dout_rows = 0;   ///< [48 or 24][padded Dv]
  std::int64_t lse = 0;         ///< [48], in units of log2; -inf for a row that saw no key
  std::int64_t delta = 0;       ///< [48]
  std::int64_t specials = 0;    ///< one number: not 0 when q or dout holds an infinity or a NaN
  std::int64_t total = 0;
};

constexpr QueryTileLayout query_tile_layout(Engine engine, const AttentionShape& shape) {
  const std::int64_t rows = kQueryTile / rows_per_element(engine);
  const std::int64_t value_steps = panels(steps_of(engine, shape.value_dim)) * kPanel;
  QueryTileLayout layout;
  layout.q_rows = layout.q_lanes + steps_of(engine, shape.head_dim) * kQueryTile;
  layout.dout_lanes = layout.q_rows + rows * padded_dim(shape.head_dim);
  layout.dout_rows = layout.dout_lanes + value_steps * kQueryTile;
  layout.lse = layout.dout_rows + rows * padded_dim(shape.value_dim);
  layout.delta = layout.lse + kQueryTile;
  layout.specials = layout.delta + kQueryTile;
  layout.total = layout.specials + 16;
  return layout;
}

/// A key's row of a dk, dv leaf: [dk, padded D][dv, padded Dv].
constexpr std::int64_t dkv_row_floats(const AttentionShape& shape) {
  return padded_dim(shape.head_dim) + padded_dim(shape.value_dim);
}

/// dq of one tile of one head: [D in whole panels][48].
constexpr std::int64_t dq_tile_floats(const AttentionShape& shape) {
  return panels(shape.head_dim) * kPanel * kQueryTile;
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
  Engine engine = Engine::f32;
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
  Engine engine = Engine::f32;
  BlockMask mask;
  std::int64_t first_row = 0;      ///< of the tile within its q chunk
  std::int64_t num_rows = 0;       ///< 1 .. 48
  const float* queries = nullptr;  ///< the packed tile
  const ComputeBlock* block = nullptr;
  std::int64_t kv_head = 0;
  float* dq = nullptr;   ///< added to: dq_tile_floats
  float* dkv = nullptr;  ///< added to: [key][dkv_row_floats]
  /// Keys [0, num_begun) of dkv hold a sum already; those behind are begun from 0, and counted.
  std::int64_t* num_begun = nullptr;
  ProgressHook progress;
};

/// Memory of one thread for run_gradient, 64-byte aligned. f32 turns scores into p and dout.v into
/// ds in place. bf16_pair makes three things of them: p and ds in pairs of rows, [key][24], in
/// weights and slope_rows, and ds in pairs of keys, [key / 2][48], in slopes.
struct GradientScratch {
  float* weights = nullptr;     ///< [kKeyTile][48]: scores
  float* slopes = nullptr;      ///< [kKeyTile][48]: dout.v
  float* slope_rows = nullptr;  ///< [kKeyTile][24], bf16_pair only
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
