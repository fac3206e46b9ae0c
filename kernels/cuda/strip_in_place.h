// What tile programs do with an accumulator when they read no keys, straight between registers and
// global memory: for kernels whose shared memory is full and whose registers are not. The bits are
// those of merge_states and finalize_states (states.h).
#pragma once

#include "kernels/cuda/forward_params.h"

namespace cpattn::cuda::in_place {

/// visit(column tile, pair of floats in memory) for the lane's channels of row `row` of a strip.
template <int kPanels, class Visit>
CP_DEVICE void for_each_pair(const StripOfSlot& strip, int row, const StripLane& lane,
                             const Visit& visit) {
  float* const o = strip.slot.o + (strip.first_state + row) * strip.padded_dim + lane.channel;
  CP_UNROLL
  for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
    if (8 * n + lane.channel < strip.padded_dim) visit(n, *reinterpret_cast<FloatPair*>(o + 8 * n));
  }
}

/// Rows that do not exist become empty states.
template <int kPanels>
CP_DEVICE void load_states(Accumulator<kPanels>& a, const StripOfSlot& strip) {
  const StripLane lane;
  clear(a);
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    a.m[half] = strip.slot.m[strip.first_state + row];
    a.l[half] = strip.slot.l[strip.first_state + row];
    in_place::for_each_pair<kPanels>(strip, row, lane, [&](int n, const FloatPair& from) {
      a.o[n][2 * half] = from.first;
      a.o[n][2 * half + 1] = from.second;
    });
  }
}

/// For the whole warp: the lanes of a row read what one of them writes.
template <int kPanels>
CP_DEVICE void store_states(const Accumulator<kPanels>& a, const StripOfSlot& strip) {
  const StripLane lane;
  __syncwarp();
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    if (lane.channel == 0) {
      strip.slot.m[strip.first_state + row] = a.m[half];
      strip.slot.l[strip.first_state + row] = a.l[half];
    }
    in_place::for_each_pair<kPanels>(strip, row, lane, [&](int n, FloatPair& to) {
      to = {a.o[n][2 * half], a.o[n][2 * half + 1]};
    });
  }
  __syncwarp();
}

template <int kPanels>
CP_DEVICE void merge_states(Accumulator<kPanels>& a, const StripOfSlot& strip, SlotSide side) {
  const bool is_left = side == SlotSide::left;
  const StripLane lane;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    const float m_slot = strip.slot.m[strip.first_state + row];
    const float l_slot = strip.slot.l[strip.first_state + row];
    const float m = is_left ? larger(m_slot, a.m[half]) : larger(a.m[half], m_slot);
    const float safe_m = -INFINITY < m ? m : 0.0f;  // -inf - (-inf) is never formed
    const float w_slot = exp2_nonpositive(m_slot - safe_m);
    const float w_mine = exp2_nonpositive(a.m[half] - safe_m);
    const float w_left = is_left ? w_slot : w_mine, w_right = is_left ? w_mine : w_slot;
    const auto merged = [&](float mine, float other) {
      const float left = is_left ? other : mine, right = is_left ? mine : other;
      return fmaf(right, w_right, left * w_left);
    };
    a.m[half] = m;
    a.l[half] = merged(a.l[half], l_slot);
    in_place::for_each_pair<kPanels>(strip, row, lane, [&](int n, const FloatPair& other) {
      a.o[n][2 * half] = merged(a.o[n][2 * half], other.first);
      a.o[n][2 * half + 1] = merged(a.o[n][2 * half + 1], other.second);
    });
  }
}

template <int kPanels>
CP_DEVICE void finalize_states(const Accumulator<kPanels>& a, const StripOfResult& strip) {
  const StripLane lane;
  const ResultRows& to = strip.rows;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    const std::int64_t at = strip.first_row + row;
    const float l = a.l[half], inverse = 1.0f / l;
    const std::int64_t first =
        at * to.out_row_stride + strip.head * to.out_head_stride + lane.channel;
    auto* const pairs = static_cast<std::uint16_t*>(to.out) + first;
    const bool is_paired = to.out_dtype != DType::f32 &&
                           reinterpret_cast<std::uintptr_t>(pairs) % sizeof(ElementPair) == 0;
    CP_UNROLL
    for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
      const int left = strip.value_dim - 8 * n - lane.channel;  // channels from here on
      if (left <= 0) continue;
      float pair[2];
      CP_UNROLL
      for (int i = 0; i < 2; ++i) {
        // + 0: a zero of either sign becomes +0.
        pair[i] = l != 0.0f ? divide(a.o[n][2 * half + i], l, inverse) + 0.0f : 0.0f;
      }
      if (is_paired && left > 1) {
        reinterpret_cast<ElementPair*>(pairs + 8 * n)->bits =
            to.out_dtype == DType::f16 ? ptx::pack(pair[0], pair[1], f16{})
                                       : ptx::pack(pair[0], pair[1], bf16{});
      } else {
        store_element(to.out, to.out_dtype, first + 8 * n, pair[0]);
        if (left > 1) store_element(to.out, to.out_dtype, first + 8 * n + 1, pair[1]);
      }
    }
    if (lane.channel == 0) {
      to.lse[at * to.lse_row_stride + strip.head * to.lse_head_stride] = natural_lse(a.m[half], l);
    }
  }
}

/// An op that reads no keys, for rows [row, row + 16) of an item.
template <int kPanels>
CP_DEVICE void execute(const ForwardParams& params, const ForwardItem& item, const TileOp& op,
                       int row, Accumulator<kPanels>& acc) {
  switch (op.kind) {
    case TileOpKind::block:
    case TileOpKind::accumulate:
      break;
    case TileOpKind::load:
      in_place::load_states(acc, strip_of_slot(params, item, op.slot, row));
      break;
    case TileOpKind::merge_left:
    case TileOpKind::merge_right:
      in_place::merge_states(acc, strip_of_slot(params, item, op.slot, row),
                             op.kind == TileOpKind::merge_left ? SlotSide::left : SlotSide::right);
      break;
    case TileOpKind::store:
      in_place::store_states(acc, strip_of_slot(params, item, op.slot, row));
      break;
    case TileOpKind::finalize:
    case TileOpKind::finalize_empty: {
      if (op.kind == TileOpKind::finalize_empty) clear(acc);
      const StripOfResult result = strip_of_result(params, item, row);
      if (params.head_maxima != nullptr) {
        const float largest = largest_logit(acc, result.num_rows);
        if (threadIdx.x % 32 == 0) raise_maximum(params.head_maxima + item.head, largest);
      }
      in_place::finalize_states(acc, result);
      break;
    }
  }
}

}  // namespace cpattn::cuda::in_place
