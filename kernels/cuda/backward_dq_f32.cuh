// The dq kernel of backward_f32.h: a thread block owns some rows of a q chunk for one query head
// and walks the tasks of that chunk; tiles of kKeyTile keys pass by in ascending order.
#pragma once

#include "kernels/cuda/backward_tile_f32.cuh"

namespace cpattn::cuda::f32 {

/// Shared memory: [stage of operands][ds].
template <class C>
inline constexpr int kDqStageFloats = kDotStageFloats<C::kRows, kTileColumns>;
static_assert(kDqStageFloats<GradientConfig<4>> >= kRowStageFloats);
template <class C>
inline constexpr std::size_t kDqSharedBytes = sizeof(float) *
                                              (kDqStageFloats<C> + C::kOwnRows * kWeightStride);

struct DqMemory {
  float* stage;
  float* slopes;
};

/// A tile of rows of a head, and lse and delta of the thread's.
template <class C>
struct OwnQueries {
  QueryHead head;
  int first = 0;        ///< row of the tile within its chunk
  int num_rows = 0;     ///< of the tile that exist
  float lse[C::kRows];  ///< -inf of rows that do not exist
  float delta[C::kRows];
};

template <class C>
CP_DEVICE OwnQueries<C> own_queries(const BackwardF32Params& params, const RowItem& item) {
  OwnQueries<C> own{query_head(params, *item.rows, item.head), item.first, 0, {}, {}};
  const int left = item.rows->num_rows - item.first;
  own.num_rows = left < C::kOwnRows ? left : C::kOwnRows;
  CP_UNROLL
  for (int i = 0; i < C::kRows; ++i) {
    const int row = Place{}.row + i * kSide;
    const bool exists = row < own.num_rows;
    own.lse[i] = exists ? own.head.lse[item.first + row] : -INFINITY;
    own.delta[i] = exists ? own.head.delta[item.first + row] : 0.0f;
  }
  return own;
}

/// Keys [first, first + num_keys) of a block; the thread's rows see seen[i] of them.
template <class C>
struct SeenKeys {
  KeyHead head;
  int first = 0;
  int num_keys = 0;
  int block_keys = 0;  ///< of the whole block
  int seen[C::kRows];
  bool is_masked = false;  ///< some seen[i] < num_keys
};

/// dq of the tile's rows += ds k over one tile of keys.
template <class C>
CP_DEVICE void add_keys(const BackwardF32Params& params, const OwnQueries<C>& own,
                        const SeenKeys<C>& tile, const DqMemory& memory, TileSums<C>& dq) {
  const RowForm& form = params.form;
  const int end = own.first + own.num_rows;
  const PackedRows k = rows_from(tile.head.k, form.dim, tile.first, tile.block_keys);
  {
    float s[C::kRows][kTileColumns], dp[C::kRows][kTileColumns];
    dot_products<C::kFault>(
        SignedRows{rows_from(own.head.q, form.dim, own.first, end), params.scale}, k, form.dim,
        memory.stage, s);
    dot_products<C::kFault>(rows_from(own.head.dout, form.value_dim, own.first, end),
                            rows_from(tile.head.v, form.value_dim, tile.first, tile.block_keys),
                            form.value_dim, memory.stage, dp);
    const Place place;
    CP_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      float* const row = memory.slopes + (place.row + i * kSide) * kWeightStride + place.column;
      CP_UNROLL
      for (int j = 0; j < kTileColumns; ++j) {
        weigh_pair(params.scale.multiplier, own.lse[i], own.delta[i],
                   place.column + j * kSide < tile.seen[i], s[i][j], dp[i][j]);
        row[j * kSide] = dp[i][j];
      }
    }
  }
  TileSums<C> sum;
  const auto sees = [&](int i, int key) { return key < tile.seen[i]; };
  sum_weighted<kWeightStride, C::kFault>(memory.slopes, tile.num_keys, k, tile.is_masked, sees,
                                         memory.stage, sum);
  add<C>(sum, dq);
}

/// The sums go on over one kv block. For the whole thread block.
template <class C>
CP_DEVICE void add_leaf(const BackwardF32Params& params, const RowItem& item, const GradientOp& op,
                        const OwnQueries<C>& own, const DqMemory& memory, TileSums<C>& dq) {
  const BackwardParams& common = params.common;
  const GradientKeys& keys = common.image->part<GradientKeys>(common.image->keys)[op.partner];
  const int num_keys = keys.num_keys;
  const auto seen_by = [&](int row) {  // of the tile
    const int limit = op.first_row_limit + own.first + row;
    return limit < 0 ? 0 : (limit < num_keys ? limit : num_keys);
  };
  const int largest = seen_by(own.num_rows - 1);
  const KeyHead head = key_head(params, keys, item.head / common.group_size());
  for (int first = 0; first < largest; first += kKeyTile) {
    const int left = largest - first;
    SeenKeys<C> tile{head,     first, left < kKeyTile ? left : static_cast<int>(kKeyTile),
                     num_keys, {},    false};
    CP_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      const bool is_used = own.lse[i] != -INFINITY;
      tile.seen[i] = is_used ? seen_by(Place{}.row + i * kSide) - first : 0;
      tile.is_masked = tile.is_masked || tile.seen[i] < tile.num_keys;
    }
    add_keys<C>(params, own, tile, memory, dq);
  }
}

/// dq of the thread's part: scaled once, rounded once; zeros are +0.
template <class C>
CP_DEVICE void finish(const BackwardF32Params& params, const RowItem& item,
                      const OwnQueries<C>& own, const TileSums<C>& dq) {
  const BackwardParams& common = params.common;
  const int column = 4 * Place{}.column;
  for_each_row<C::kGroups>(own.num_rows, [&](int i, int row) {
    const std::int64_t at = (item.rows->row_begin + own.first + row) * common.dq_row_stride +
                            item.head * common.dq_head_stride;
    CP_UNROLL
    for (int c = 0; c < 4 * C::kGroups; ++c) {
      const int channel = c / 4 * kGroupChannels + column + c % 4;
      if (channel >= params.form.dim) continue;
      store_element(common.dq, common.dq_dtype, at + channel, dq[i][c] * common.scale + 0.0f);
    }
  });
}

template <class C>
CP_DEVICE void execute(const BackwardF32Params& params, const RowItem& item, const GradientOp& op,
                       const OwnQueries<C>& own, const DqMemory& memory, TileSums<C>& dq) {
  const BackwardParams& common = params.common;
  switch (op.kind) {
    case GradientOpKind::leaf:
      if (C::kFault != Fault::sums_not_reset) clear<C>(dq);
      return add_leaf<C>(params, item, op, own, memory, dq);
    case GradientOpKind::continue_leaf:
      return add_leaf<C>(params, item, op, own, memory, dq);
    case GradientOpKind::load:
    case GradientOpKind::add:
    case GradientOpKind::store: {
      float* const slot =
          reinterpret_cast<float*>(common.dq_slots + op.slot * common.dq_slot_bytes);
      const int floats = common.slot_form.dk_floats();
      float* const at = slot + (item.head * common.dq_slot_rows + own.first) * floats;
      return execute_on_sums<C>(op.kind, {at, floats, own.num_rows}, dq);
    }
    case GradientOpKind::finish:
      return finish<C>(params, item, own, dq);
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads, 1)  // without the 1, ptxas would rather spill
    dq_kernel(const __grid_constant__ BackwardF32Params params) {
  CP_DYNAMIC_SMEM(shared);
  float* const stage = reinterpret_cast<float*>(shared);
  const DqMemory memory{stage, stage + kDqStageFloats<C>};
  const GradientImage& image = *params.common.image;
  const std::int64_t num_items = std::int64_t{image.num_row_tiles} * params.common.num_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item = row_item(params.common, i);
    const OwnQueries<C> own = own_queries<C>(params, item);
    TileSums<C> dq;
    clear<C>(dq);
    for (std::int32_t place = item.rows->op_begin; place < item.rows->op_end; ++place) {
      execute<C>(params, item, image.part<GradientOp>(image.ops)[place], own, memory, dq);
    }
  }
}

}  // namespace cpattn::cuda::f32
