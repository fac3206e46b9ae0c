// The dq kernel of backward_sm90.h: a thread block owns rows of a q chunk for one query head and
// walks the tasks of that chunk; keys pass by in ascending order.
//
// S = Q K^T and dP = dO V^T, so what is made of them is the left operand of dQ += dS K.
#pragma once

#include "kernels/cuda/backward_tile_sm90.cuh"

namespace cpattn::cuda::sm90_gradient {

/// The tiles of a kv block whose keys some row of an item sees: the first ones.
struct KeyTiles {
  const std::byte* packed = nullptr;
  int num_keys = 0;
  int num_tiles = 0;
};

CP_DEVICE KeyTiles key_tiles(const BackwardParams& params, const RowItem& item,
                             const GradientOp& op) {
  const GradientKeys& keys = params.image->part<GradientKeys>(params.image->keys)[op.partner];
  const int left = item.rows->num_rows - item.first;
  const RowLimits limits{op.first_row_limit + item.first, keys.num_keys};
  return {
      keys.packed + item.head / params.group_size() * params.kv_form().head_bytes(keys.num_keys),
      keys.num_keys,
      (limits.of_any(left < kOwnRows ? left : kOwnRows) + kTileRows - 1) / kTileRows};
}

template <class C>
CP_DEVICE void produce_keys(Producer<C>& me) {
  const BackwardParams& params = me.params;
  const GradientImage& image = *params.image;
  const QueryForm form = params.query_form();
  const std::int64_t num_items = std::int64_t{image.num_row_tiles} * params.num_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item = row_item(params, i);
    me.load_own(item.rows->packed + item.head * form.head_bytes(item.rows->num_rows) +
                    item.first / kTileRows * form.tile_bytes(),
                form.tile_bytes(), item.rows->num_rows - item.first);
    for (std::int32_t at = item.rows->op_begin; at < item.rows->op_end; ++at) {
      const GradientOp op = image.part<GradientOp>(image.ops)[at];
      if (!is_leaf(op)) continue;
      const KeyTiles keys = key_tiles(params, item, op);
      for (int tile = 0; tile < keys.num_tiles; ++tile) {
        me.load_other(keys.packed + tile * params.kv_form().tile_bytes(), false);
      }
    }
  }
}

/// The tile of keys at hand, from `key` on, for the group's rows. `limits`: of the warp's strip.
template <class C>
CP_DEVICE void add_tile(const Consumer<C>& me, const RowStrip& strip, const RowLimits& limits,
                        int key, bool is_partial, Sums<C>& dq) {
  const StripLane lane;
  Scores s, dp;
  Weights ds;
  start_scores<C>(me.own_first(), me.tile_first(), s);
  start_scores<C>(me.own_second(), me.tile_second(), dp);
  ptx::wait_products<1>();
  hold(s);
  CP_UNROLL
  for (int n = 0; n < kTileRows / 8; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      s[n][i] = weight_of(me.params.scale_log2, strip.lse[i / 2], s[n][i]);
    }
  }
  ptx::wait_products<0>();
  hold(dp);
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2;
    const int limit = strip.lse[half] == -INFINITY ? 0 : limits.of_row(lane.row + 8 * half) - key;
    const float delta = C::kFault == Fault::delta_ignored ? 0.0f : strip.delta[half];
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      const bool is_visible = 8 * n + lane.channel + i % 2 < limit;
      dp[n][i] = is_visible ? s[n][i] * (dp[n][i] - delta) : 0.0f;
    }
  }
  round_scores<typename C::T>(dp, ds);
  const bool has_special = is_partial && take_specials_out<C, Decisive::first, C::kPanels>(me);
  start_sums<C>(me.tile_first(), ds, dq);
  ptx::wait_products<0>();
  hold(dq);
  hold(ds);
  if (!has_special) return;
  mark_specials<C>(
      me, 0, [&](int row, int k) { return key + k < limits.of_row(row); }, dq);
}

/// The sums go on over one kv block.
template <class C>
CP_DEVICE void add_leaf(Consumer<C>& me, const RowItem& item, const GradientOp& op,
                        const RowStrip& strip, Sums<C>& dq) {
  const KeyTiles keys = key_tiles(me.params, item, op);
  const int first_limit = op.first_row_limit + item.first;
  const int rows = item.rows->num_rows - item.first - me.group_row();
  const RowLimits of_group{first_limit + me.group_row(), keys.num_keys};
  const RowLimits of_strip{op.first_row_limit + strip.row, keys.num_keys};
  const int seen = of_group.of_any(rows < kGroupRows ? rows : kGroupRows);
  for (int tile = 0; tile < keys.num_tiles; ++tile) {
    const int key = tile * kTileRows;
    const int end = key + kTileRows < keys.num_keys ? key + kTileRows : keys.num_keys;
    const bool is_partial = first_limit < end;
    me.wait_for_tile();
    // Keys that none of the group's rows sees would add zeros.
    if (key < seen) {
      add_tile<C>(me, strip, of_strip, key, is_partial, dq);
    } else if (is_partial) {
      take_specials_out<C, Decisive::first, C::kPanels>(me);
    }
    me.release_tile();
  }
}

template <class C>
CP_DEVICE void consume_keys(Consumer<C>& me) {
  const BackwardParams& params = me.params;
  const GradientImage& image = *params.image;
  const std::int64_t num_items = std::int64_t{image.num_row_tiles} * params.num_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item = row_item(params, i);
    const RowStrip strip = row_strip(params, item, me.warp_row());
    Sums<C> dq;
    clear_sums(dq);
    me.wait_for_own();
    for (std::int32_t at = item.rows->op_begin; at < item.rows->op_end; ++at) {
      const GradientOp op = image.part<GradientOp>(image.ops)[at];
      if (op.kind == GradientOpKind::leaf && C::kFault != Fault::sums_not_reset) clear_sums(dq);
      if (is_leaf(op)) {
        add_leaf<C>(me, item, op, strip, dq);
      } else {
        execute_on_dq(params, item, op, strip, dq);
      }
    }
    me.release_own();
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  run_warpgroups<C>(
      params, memory, [](Producer<C>& me) { produce_keys<C>(me); },
      [](Consumer<C>& me) { consume_keys<C>(me); });
}

}  // namespace cpattn::cuda::sm90_gradient
