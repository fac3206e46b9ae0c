// The dk, dv kernel of backward_f32.h: a thread block owns some keys of a kv block for one kv head
// and walks the tasks of that block; tiles of kQueryTile rows of all heads of the group pass by,
// head by head, rows ascending.
#pragma once

#include "kernels/cuda/backward_tile_f32.cuh"

namespace cpattn::cuda::f32 {

/// Query rows of a thread in a tile of them.
inline constexpr int kQueryColumns = static_cast<int>(kQueryTile) / kSide;

/// Shared memory: [stage of operands][p][ds].
template <class C>
inline constexpr int kDkvStageFloats = kDotStageFloats<C::kRows, kQueryColumns> < kRowStageFloats
                                           ? kRowStageFloats
                                           : kDotStageFloats<C::kRows, kQueryColumns>;
template <class C>
inline constexpr int kDkvWeightFloats = C::kOwnRows* kQueryWeightStride;
template <class C>
inline constexpr std::size_t kDkvSharedBytes = sizeof(float) *
                                               (kDkvStageFloats<C> + 2 * kDkvWeightFloats<C>);

struct DkvMemory {
  float* stage;
  float* weights;
  float* slopes;
};

/// A tile of keys of a head.
struct OwnKeys {
  KeyHead head;
  int first = 0;     ///< of the tile within its block
  int num_keys = 0;  ///< of the block
};

template <class C>
struct DkvSums {
  TileSums<C> dk;
  TileSums<C> dv;
};

/// Rows [first, first + num_rows) of a q chunk; the thread's keys are seen by those from
/// first_that_sees[i] on.
template <class C>
struct QueryTile {
  QueryHead head;
  int first = 0;
  int num_rows = 0;
  int chunk_rows = 0;  ///< of the whole chunk
  int first_that_sees[C::kRows];
  bool is_masked = false;  ///< some first_that_sees[i] > 0
};

/// Scores and dots to p and ds of the thread, which go to shared memory. Rows that do not exist or
/// saw no key at all (lse = -inf) contribute nothing.
template <class C>
CP_DEVICE void weigh(const BackwardF32Params& params, const QueryTile<C>& tile,
                     const DkvMemory& memory, float (&s)[C::kRows][kQueryColumns],
                     float (&dp)[C::kRows][kQueryColumns]) {
  const Place place;
  CP_UNROLL
  for (int j = 0; j < kQueryColumns; ++j) {
    const int row = place.column + j * kSide;
    const bool exists = row < tile.num_rows;
    const float lse = exists ? tile.head.lse[tile.first + row] : -INFINITY;
    const float delta = exists ? tile.head.delta[tile.first + row] : 0.0f;
    CP_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      weigh_pair(params.scale.multiplier, lse, delta,
                 lse != -INFINITY && row >= tile.first_that_sees[i], s[i][j], dp[i][j]);
      const int at = (place.row + i * kSide) * kQueryWeightStride + row;
      memory.weights[at] = s[i][j];
      memory.slopes[at] = dp[i][j];
    }
  }
}

/// dv += p dout and dk += ds q over one tile of rows.
template <class C>
CP_DEVICE void add_rows(const BackwardF32Params& params, const OwnKeys& own,
                        const QueryTile<C>& tile, const DkvMemory& memory, DkvSums<C>& sums) {
  const RowForm& form = params.form;
  const PackedRows q = rows_from(tile.head.q, form.dim, tile.first, tile.chunk_rows);
  const PackedRows dout = rows_from(tile.head.dout, form.value_dim, tile.first, tile.chunk_rows);
  {
    float s[C::kRows][kQueryColumns], dp[C::kRows][kQueryColumns];
    dot_products<C::kFault>(rows_from(own.head.k, form.dim, own.first, own.num_keys),
                            SignedRows{q, params.scale}, form.dim, memory.stage, s);
    dot_products<C::kFault>(rows_from(own.head.v, form.value_dim, own.first, own.num_keys), dout,
                            form.value_dim, memory.stage, dp);
    weigh<C>(params, tile, memory, s, dp);
  }
  const auto sees = [&](int i, int row) { return row >= tile.first_that_sees[i]; };
  TileSums<C> sum;
  sum_weighted<kQueryWeightStride, C::kFault>(memory.weights, tile.num_rows, dout, tile.is_masked,
                                              sees, memory.stage, sum);
  add<C>(sum, sums.dv);
  sum_weighted<kQueryWeightStride, C::kFault>(memory.slopes, tile.num_rows, q, tile.is_masked, sees,
                                              memory.stage, sum);
  add<C>(sum, sums.dk);
}

/// The sums go on over one q chunk. For the whole thread block.
template <class C>
CP_DEVICE void add_leaf(const BackwardF32Params& params, const KeyItem& item, const GradientOp& op,
                        const OwnKeys& own, const DkvMemory& memory, DkvSums<C>& sums) {
  const BackwardParams& common = params.common;
  const GradientRows& rows = common.image->part<GradientRows>(common.image->rows)[op.partner];
  const auto first_that_sees = [&](int key) {  // of the tile
    const int row = own.first + key + 1 - op.first_row_limit;
    return row > 0 ? row : 0;
  };
  constexpr int kStep = static_cast<int>(kQueryTile);
  const int first_row = first_that_sees(0);
  const int begin =
      C::kFault == Fault::tiles_from_first_row ? first_row : first_row / kStep * kStep;
  const int group = common.group_size();
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    const QueryHead queries = query_head(params, rows, head);
    for (int first = begin; first < rows.num_rows; first += kStep) {
      const int left = rows.num_rows - first;
      QueryTile<C> tile{queries, first, left < kStep ? left : kStep, rows.num_rows, {}, false};
      CP_UNROLL
      for (int i = 0; i < C::kRows; ++i) {
        tile.first_that_sees[i] = first_that_sees(Place{}.row + i * kSide) - first;
        tile.is_masked = tile.is_masked || tile.first_that_sees[i] > 0;
      }
      add_rows<C>(params, own, tile, memory, sums);
    }
  }
}

/// The tile's dk and dv in a slot.
template <class C>
CP_DEVICE void execute_on_slot(const BackwardF32Params& params, const KeyItem& item,
                               const GradientOp& op, DkvSums<C>& sums) {
  const BackwardParams& common = params.common;
  const GradientSlotForm& form = common.slot_form;
  const int num_keys = item.keys->num_keys, left = num_keys - item.first;
  float* const dk =
      reinterpret_cast<float*>(common.image->part<std::byte*>(common.image->dkv_slots)[op.slot]) +
      item.head * form.head_floats(num_keys);
  float* const dv = dk + std::int64_t{num_keys} * form.dk_floats();
  const auto rows_of = [&](float* part, int floats) {
    return RowsOfSlot{part + std::int64_t{item.first} * floats, floats, left};
  };
  execute_on_sums<C>(op.kind, rows_of(dk, form.dk_floats()), sums.dk);
  execute_on_sums<C>(op.kind, rows_of(dv, form.dv_floats()), sums.dv);
}

template <class C>
CP_DEVICE void execute(const BackwardF32Params& params, const KeyItem& item, const GradientOp& op,
                       const OwnKeys& own, const DkvMemory& memory, DkvSums<C>& sums) {
  switch (op.kind) {
    case GradientOpKind::leaf:
      if (C::kFault != Fault::sums_not_reset) {
        clear<C>(sums.dk);
        clear<C>(sums.dv);
      }
      return add_leaf<C>(params, item, op, own, memory, sums);
    case GradientOpKind::continue_leaf:
      return add_leaf<C>(params, item, op, own, memory, sums);
    case GradientOpKind::load:
    case GradientOpKind::add:
    case GradientOpKind::store:
      return execute_on_slot<C>(params, item, op, sums);
    case GradientOpKind::finish:  // of dq only
      return;
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads, 1)  // without the 1, ptxas would rather spill
    dkv_kernel(const __grid_constant__ BackwardF32Params params) {
  CP_DYNAMIC_SMEM(shared);
  float* const stage = reinterpret_cast<float*>(shared);
  float* const weights = stage + kDkvStageFloats<C>;
  const DkvMemory memory{stage, weights, weights + kDkvWeightFloats<C>};
  const GradientImage& image = *params.common.image;
  const std::int64_t num_items = std::int64_t{image.num_key_tiles} * params.common.num_kv_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const KeyItem item = key_item(params.common, i);
    const OwnKeys own{key_head(params, *item.keys, item.head), item.first, item.keys->num_keys};
    DkvSums<C> sums;
    clear<C>(sums.dk);
    clear<C>(sums.dv);
    for (std::int32_t place = item.keys->op_begin; place < item.keys->op_end; ++place) {
      execute<C>(params, item, image.part<GradientOp>(image.ops)[place], own, memory, sums);
    }
  }
}

}  // namespace cpattn::cuda::f32
