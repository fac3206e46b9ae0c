// The dk, dv kernel of backward_sm90.h: a thread block owns keys of a kv block for one kv head and
// walks the tasks of that block; the queries of all heads of the group pass by, head by head, rows
// ascending.
//
// S^T = K Q^T and dP^T = V dO^T, so what is made of them is the left operand of dV += P^T dO and
// dK += dS^T Q.
#pragma once

#include "kernels/cuda/backward_tile_sm90.cuh"

namespace cpattn::cuda::sm90_gradient {

template <class C>
struct DkvSums {
  Sums<C> dk;
  Sums<C> dv;
};

/// The tiles of a q chunk whose rows see keys of an item: of each head those from `first` on.
struct QueryWalk {
  const std::byte* packed = nullptr;
  int num_rows = 0;
  int first = 0;
  int end = 0;
};

CP_DEVICE QueryWalk query_walk(const BackwardParams& params, const KeyItem& item,
                               const GradientOp& op) {
  const GradientRows& rows = params.image->part<GradientRows>(params.image->rows)[op.partner];
  const int first_row = item.first + 1 - op.first_row_limit;  // the first that sees the first key
  const QueryForm form = params.query_form();
  return {rows.packed + item.head * params.group_size() * form.head_bytes(rows.num_rows),
          rows.num_rows, first_row > 0 ? first_row / kTileRows : 0,
          (rows.num_rows + kTileRows - 1) / kTileRows};
}

template <class C>
CP_DEVICE void produce_queries(Producer<C>& me) {
  const BackwardParams& params = me.params;
  const GradientImage& image = *params.image;
  const KvForm form = params.kv_form();
  const QueryForm query_form = params.query_form();
  const std::int64_t num_items = std::int64_t{image.num_key_tiles} * params.num_kv_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const KeyItem item = key_item(params, i);
    me.load_own(item.keys->packed + item.head * form.head_bytes(item.keys->num_keys) +
                    item.first / kTileRows * form.tile_bytes(),
                form.tile_bytes(), item.keys->num_keys - item.first);
    for (std::int32_t at = item.keys->op_begin; at < item.keys->op_end; ++at) {
      const GradientOp op = image.part<GradientOp>(image.ops)[at];
      if (!is_leaf(op)) continue;
      const QueryWalk walk = query_walk(params, item, op);
      for (int head = 0; head < params.group_size(); ++head) {
        const std::byte* const tiles = walk.packed + head * query_form.head_bytes(walk.num_rows);
        for (int tile = walk.first; tile < walk.end; ++tile) {
          me.load_other(tiles + tile * query_form.tile_bytes(), true);
        }
      }
    }
  }
}

/// visit(n, i, lse, delta, is_visible) for the pairs of the lane: element i of x[n] is key
/// lane.row + 8 (i / 2) of the strip and row 8 n + lane.channel + i % 2 of the tile. Rows that saw
/// no key at all (lse = -inf) contribute nothing.
template <class C, class Visit>
CP_DEVICE void for_each_pair(const Consumer<C>& me, const KeyStrip& strip, const Visit& visit) {
  const StripLane lane;
  CP_UNROLL
  for (int n = 0; n < kTileRows / 8; ++n) {
    const int row = 8 * n + lane.channel;
    const FloatPair lse = me.lse(row), delta = me.delta(row);
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float of_lse = i % 2 == 0 ? lse.first : lse.second;
      visit(n, i, of_lse, i % 2 == 0 ? delta.first : delta.second,
            of_lse != -INFINITY && strip.sees(lane.row + i / 2 * 8, row + i % 2));
    }
  }
}

/// The tile at hand for the group's keys. `strip`: of the calling warp.
template <class C>
CP_DEVICE void add_tile(const Consumer<C>& me, const KeyStrip& strip, bool is_partial,
                        DkvSums<C>& sums) {
  Scores s, dp;
  Weights p, ds;
  start_scores<C>(me.own_first(), me.tile_first(), s);
  start_scores<C>(me.own_second(), me.tile_second(), dp);
  ptx::wait_products<1>();
  hold(s);
  for_each_pair(me, strip, [&](int n, int i, float lse, float, bool is_visible) {
    s[n][i] = is_visible ? weight_of(me.params.scale_log2, lse, s[n][i]) : 0.0f;
  });
  round_scores<typename C::T>(s, p);
  ptx::wait_products<0>();
  hold(dp);
  const bool has_special = is_partial && take_specials_out<C, Decisive::last, 2 * C::kPanels>(me);
  start_sums<C>(me.tile_second(), p, sums.dv);
  for_each_pair(me, strip, [&](int n, int i, float, float delta, bool is_visible) {
    dp[n][i] = is_visible ? s[n][i] * (dp[n][i] - delta) : 0.0f;
  });
  round_scores<typename C::T>(dp, ds);
  start_sums<C>(me.tile_first(), ds, sums.dk);
  ptx::wait_products<0>();
  hold(sums.dv);
  hold(sums.dk);
  hold(p);
  hold(ds);
  if (!has_special) return;
  const auto sees = [&](int i, int k) { return strip.sees(i, k); };
  mark_specials<C>(me, 0, sees, sums.dk);
  mark_specials<C>(me, C::kPanels * kPanelColumns, sees, sums.dv);
}

/// The sums go on over one q chunk.
template <class C>
CP_DEVICE void add_leaf(Consumer<C>& me, const KeyItem& item, const GradientOp& op,
                        DkvSums<C>& sums) {
  const QueryWalk walk = query_walk(me.params, item, op);
  const int num_keys = item.keys->num_keys;
  const int end_of_item = item.first + kOwnRows;
  const int last_key = (end_of_item < num_keys ? end_of_item : num_keys) - 1;
  const int first_of_group = item.first + me.group_row();
  for (int head = 0; head < me.params.group_size(); ++head) {
    for (int tile = walk.first; tile < walk.end; ++tile) {
      const int row = tile * kTileRows;
      const int end = row + kTileRows < walk.num_rows ? row + kTileRows : walk.num_rows;
      const bool is_partial = last_key >= op.first_row_limit + row;
      me.wait_for_tile();
      // Tiles that see none of the group's keys would add zeros.
      if (first_of_group <= last_key && first_of_group < op.first_row_limit + end - 1) {
        add_tile<C>(me, {item.first + me.warp_row(), row, op.first_row_limit}, is_partial, sums);
      } else if (is_partial) {
        take_specials_out<C, Decisive::last, 2 * C::kPanels>(me);
      }
      me.release_tile();
    }
  }
}

/// The strips of dk and dv of the calling warp in a slot.
template <class C>
CP_DEVICE void execute_on_slot(const Consumer<C>& me, const KeyItem& item, const GradientOp& op,
                               DkvSums<C>& sums) {
  const BackwardParams& params = me.params;
  const GradientSlotForm& form = params.slot_form;
  const int num_keys = item.keys->num_keys;
  const int first_key = item.first + me.warp_row();
  float* const dk =
      reinterpret_cast<float*>(params.image->part<std::byte*>(params.image->dkv_slots)[op.slot]) +
      item.head * form.head_floats(num_keys);
  float* const dv = dk + std::int64_t{num_keys} * form.dk_floats();
  const int rows = num_keys - first_key;
  execute_on_sums(
      op.kind, {dk + std::int64_t{first_key} * form.dk_floats(), form.dk_floats(), rows}, sums.dk);
  execute_on_sums(
      op.kind, {dv + std::int64_t{first_key} * form.dv_floats(), form.dv_floats(), rows}, sums.dv);
}

template <class C>
CP_DEVICE void consume_queries(Consumer<C>& me) {
  const BackwardParams& params = me.params;
  const GradientImage& image = *params.image;
  const std::int64_t num_items = std::int64_t{image.num_key_tiles} * params.num_kv_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const KeyItem item = key_item(params, i);
    DkvSums<C> sums;
    clear_sums(sums.dk);
    clear_sums(sums.dv);
    me.wait_for_own();
    for (std::int32_t at = item.keys->op_begin; at < item.keys->op_end; ++at) {
      const GradientOp op = image.part<GradientOp>(image.ops)[at];
      if (op.kind == GradientOpKind::leaf && C::kFault != Fault::sums_not_reset) {
        clear_sums(sums.dk);
        clear_sums(sums.dv);
      }
      if (is_leaf(op)) {
        add_leaf<C>(me, item, op, sums);
      } else {
        execute_on_slot<C>(me, item, op, sums);
      }
    }
    me.release_own();
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    dkv_kernel(const __grid_constant__ BackwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  run_warpgroups<C>(
      params, memory, [](Producer<C>& me) { produce_queries<C>(me); },
      [](Consumer<C>& me) { consume_queries<C>(me); });
}

}  // namespace cpattn::cuda::sm90_gradient
