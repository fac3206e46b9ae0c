// The kernel of forward_f32.h.
#pragma once

#include "kernels/cuda/f32_state.cuh"
#include "kernels/cuda/forward_params.h"

namespace cpattn::cuda::f32 {

struct ForwardF32Params {
  ForwardParams common;
  RowForm form;
};

/// Shared memory: [stage of operands][weights][sum of each row's weights].
template <int kGroups>
inline constexpr int kForwardStageFloats = kDotStageFloats<kThreadRows<kGroups>, kTileColumns>;
static_assert(kForwardStageFloats<4> >= kRowStageFloats);
template <int kGroups>
inline constexpr int kWeightFloats = kTileRows<kGroups>* kWeightStride;
template <int kGroups>
inline constexpr std::size_t kForwardSharedBytes = sizeof(float) *
                                                   (kForwardStageFloats<kGroups> +
                                                    kWeightFloats<kGroups> + kTileRows<kGroups>);

struct ForwardMemory {
  float* stage;
  float* weights;
  float* row_sums;
};

/// Rows of a tile of the caller's q, with the sign of the scale; zeros beyond them.
struct ScaledQueries {
  PieceRows q;
  ScoreScale scale;
  std::int64_t first_row = 0;
  std::int64_t head = 0;
  int num_rows = 0;

  CP_DEVICE Quad quad(int row, int channel) const {
    Quad result{};
    if (row >= num_rows || channel >= q.dim) return result;
    const float* const from = static_cast<const float*>(q.elements) +
                              (first_row + row) * q.row_stride + head * q.head_stride + channel;
    if (q.is_aligned && channel + 4 <= q.dim) {
      result = quad_at(from);
    } else {
      CP_UNROLL
      for (int c = 0; c < 4; ++c) result.at[c] = channel + c < q.dim ? from[c] : 0.0f;
    }
    CP_UNROLL
    for (int c = 0; c < 4; ++c) result.at[c] = scaled(result.at[c], scale);
    return result;
  }
};

/// Keys [first, first + num_keys) of a block, for rows of which the thread's see seen[i] of them.
template <int kRows>
struct KeyTile {
  int first = 0;
  int num_keys = 0;
  bool is_masked = false;  ///< some row does not see some key of the whole tile
  int seen[kRows];
};

/// Scores to weights 2^(c s - m) of the thread, which go to shared memory; m grows, and `rescale`
/// is what l and o are worth then.
template <int kRows>
CP_DEVICE void weigh(float (&score)[kRows][kTileColumns], const KeyTile<kRows>& tile,
                     float multiplier, float* weights, float (&m)[kRows], float (&rescale)[kRows]) {
  const Place place;
  CP_UNROLL
  for (int i = 0; i < kRows; ++i) {
    float best = -INFINITY;
    CP_UNROLL
    for (int j = 0; j < kTileColumns; ++j) {
      if (tile.is_masked && place.column + j * kSide >= tile.seen[i]) score[i][j] = -INFINITY;
      best = larger(best, score[i][j]);
    }
    CP_UNROLL
    for (int distance = kSide / 2; distance > 0; distance /= 2) {
      best = larger(best, __shfl_xor_sync(0xffffffffu, best, distance));
    }
    const float new_m = larger(m[i], best * multiplier);
    // A row that has seen nothing yet keeps m = -inf; its weights, taken against 0, are 0.
    const float safe_m = -INFINITY < new_m ? new_m : 0.0f;
    rescale[i] = exp2_nonpositive(m[i] - safe_m);
    m[i] = new_m;
    float* const row = weights + (place.row + i * kSide) * kWeightStride + place.column;
    CP_UNROLL
    for (int j = 0; j < kTileColumns; ++j) {
      row[j * kSide] = exp2_nonpositive(fmaf(score[i][j], multiplier, -safe_m));
    }
  }
}

/// The sum of each row's weights, keys ascending from 0: a thread does a row. The first barrier of
/// sum_weighted stands between this and whoever reads them.
template <int kGroups>
CP_DEVICE void sum_rows(const ForwardMemory& memory, int num_keys) {
  if (threadIdx.x >= kTileRows<kGroups>) return;
  const float* const row = memory.weights + threadIdx.x * kWeightStride;
  float sum = 0.0f;
  CP_UNROLL_BY(2)
  for (int key = 0; key < num_keys; key += 4) {
    const Quad weight = quad_at(row + key);
    CP_UNROLL
    for (int k = 0; k < 4; ++k) sum += weight.at[k];
  }
  memory.row_sums[threadIdx.x] = sum;
}

/// One tile of keys. `is_fresh`: nothing was attended to before it.
template <int kGroups>
CP_DEVICE void attend_tile(const ForwardF32Params& params, const ScaledQueries& queries,
                           const PackedRows& keys, const PackedRows& values,
                           const KeyTile<kThreadRows<kGroups>>& tile, bool is_fresh,
                           const ForwardMemory& memory, RowStates<kGroups>& a) {
  constexpr int kRows = kThreadRows<kGroups>;
  float rescale[kRows];
  {
    float score[kRows][kTileColumns];
    dot_products(queries, keys, params.form.dim, memory.stage, score);
    weigh(score, tile, params.common.scale.multiplier, memory.weights, a.m, rescale);
  }
  __syncthreads();
  sum_rows<kGroups>(memory, tile.num_keys);
  float sum[kRows][4 * kGroups];
  const auto sees = [&](int i, int key) { return key < tile.seen[i]; };
  sum_weighted<kWeightStride>(memory.weights, tile.num_keys, values, tile.is_masked, sees,
                              memory.stage, sum);
  const Place place;
  CP_UNROLL
  for (int i = 0; i < kRows; ++i) {
    a.l[i] = fmaf(a.l[i], rescale[i], memory.row_sums[place.row + i * kSide]);
    CP_UNROLL
    for (int c = 0; c < 4 * kGroups; ++c) {
      a.o[i][c] = is_fresh ? sum[i][c] : fmaf(a.o[i][c], rescale[i], sum[i][c]);
    }
  }
}

/// How many keys of a block a row of the item's tile sees.
CP_DEVICE int seen_keys(const ForwardItem& item, const TileOp& op, int row, int num_keys) {
  const int limit = op.first_row_limit + item.first_row + row;
  return limit < 0 ? 0 : (limit < num_keys ? limit : num_keys);
}

/// The accumulator continued over a kv block, or begun with it.
template <int kGroups>
CP_DEVICE void attend(const ForwardF32Params& params, const ForwardItem& item, const TileOp& op,
                      const ForwardMemory& memory, RowStates<kGroups>& a) {
  const ForwardParams& common = params.common;
  const KeyBlock block = common.image->part<KeyBlock>(common.image->kv_blocks)[op.kv_block];
  const auto num_keys = static_cast<int>(block.num_keys);
  const RowForm& form = params.form;
  const float* const k = reinterpret_cast<const float*>(block.packed) +
                         item.head / common.group_size * form.kv_floats(num_keys);
  const float* const v = k + form.first_floats(num_keys);
  const ScaledQueries queries{common.q, common.scale, item.program->row_begin + item.first_row,
                              item.head, item.num_rows};
  const int smallest = seen_keys(item, op, 0, num_keys);
  const int largest = seen_keys(item, op, item.num_rows - 1, num_keys);
  bool is_fresh = op.kind == TileOpKind::block;
  if (is_fresh) clear(a);
  for (int first = 0; first < largest; first += kKeyTile) {
    const int left = largest - first;
    KeyTile<kThreadRows<kGroups>> tile{first,
                                       left < kKeyTile ? left : static_cast<int>(kKeyTile),
                                       first + kKeyTile > smallest,
                                       {}};
    const Place place;
    CP_UNROLL
    for (int i = 0; i < kThreadRows<kGroups>; ++i) {
      const int row = place.row + i * kSide;
      tile.seen[i] = row < item.num_rows ? seen_keys(item, op, row, num_keys) - first : 0;
    }
    attend_tile(params, queries, rows_from(k, form.dim, first, num_keys),
                rows_from(v, form.value_dim, first, num_keys), tile, is_fresh, memory, a);
    is_fresh = false;
  }
}

template <int kGroups>
CP_DEVICE void execute(const ForwardF32Params& params, const ForwardItem& item, const TileOp& op,
                       const ForwardMemory& memory, RowStates<kGroups>& a) {
  const ForwardParams& common = params.common;
  switch (op.kind) {
    case TileOpKind::block:
    case TileOpKind::accumulate:
      return attend(params, item, op, memory, a);
    case TileOpKind::load:
      return load_states(a, strip_of_slot(common, item, op.slot, 0));
    case TileOpKind::merge_left:
      return merge_states<SlotSide::left>(a, strip_of_slot(common, item, op.slot, 0));
    case TileOpKind::merge_right:
      return merge_states<SlotSide::right>(a, strip_of_slot(common, item, op.slot, 0));
    case TileOpKind::store:
      return store_states(a, strip_of_slot(common, item, op.slot, 0));
    case TileOpKind::finalize: {
      const StripOfResult result = strip_of_result(common, item, 0);
      finalize_states<false>(a, result);
      if (common.head_maxima == nullptr) return;
      const float largest = largest_logit(a, result.num_rows);
      if (threadIdx.x % 32 == 0) raise_maximum(common.head_maxima + item.head, largest);
      return;
    }
    case TileOpKind::finalize_empty:
      return finalize_states<true>(a, strip_of_result(common, item, 0));
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1)  // without the 1, ptxas would rather spill
    forward_kernel(const __grid_constant__ ForwardF32Params params) {
  CP_DYNAMIC_SMEM(shared);
  float* const stage = reinterpret_cast<float*>(shared);
  float* const weights = stage + kForwardStageFloats<kGroups>;
  const ForwardMemory memory{stage, weights, weights + kWeightFloats<kGroups>};
  const StepImage& image = *params.common.image;
  const std::int64_t num_items = std::int64_t{image.num_tiles} * params.common.num_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const ForwardItem item = forward_item(params.common, i, kTileRows<kGroups>);
    RowStates<kGroups> a;
    clear(a);
    for (std::int32_t place = item.program->op_begin; place < item.program->op_end; ++place) {
      execute(params, item, image.part<TileOp>(image.ops)[place], memory, a);
    }
  }
}

}  // namespace cpattn::cuda::f32
