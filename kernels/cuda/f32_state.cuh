// The accumulator of the f32 forward: the states (m, l, o) of a tile of query rows in the registers
// of a thread block, and what a tile program does with it besides attending.
//
// A thread holds rows and channels as Place says; the 16 threads of a row, which are neighbours in
// a warp, hold equal m and l.
#pragma once

#include "kernels/cuda/accumulator.h"
#include "kernels/cuda/f32_tile.cuh"

namespace cpattn::cuda::f32 {

template <int kGroups>
struct RowStates {
  float m[kThreadRows<kGroups>];
  float l[kThreadRows<kGroups>];
  float o[kThreadRows<kGroups>][4 * kGroups];
};

/// visit(first of four places in o, quad in memory) for the thread's channels of row `row` of the
/// tile.
template <int kGroups, class Visit>
CP_DEVICE void for_each_quad(const StripOfSlot& tile, int row, const Visit& visit) {
  const int first = 4 * Place{}.column;
  float* const o = tile.slot.o + (tile.first_state + row) * tile.padded_dim + first;
  CP_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    if (g * kGroupChannels + first < tile.padded_dim) visit(4 * g, quad_at(o + g * kGroupChannels));
  }
}

template <int kGroups>
CP_DEVICE void clear(RowStates<kGroups>& a) {
  CP_UNROLL
  for (int i = 0; i < kThreadRows<kGroups>; ++i) {
    a.m[i] = -INFINITY;
    a.l[i] = 0.0f;
    CP_UNROLL
    for (int c = 0; c < 4 * kGroups; ++c) a.o[i][c] = 0.0f;
  }
}

/// Rows that do not exist become empty states.
template <int kGroups>
CP_DEVICE void load_states(RowStates<kGroups>& a, const StripOfSlot& tile) {
  clear(a);
  for_each_row<kGroups>(tile.num_rows, [&](int i, int row) {
    a.m[i] = tile.slot.m[tile.first_state + row];
    a.l[i] = tile.slot.l[tile.first_state + row];
    for_each_quad<kGroups>(tile, row, [&](int place, const Quad& from) {
      CP_UNROLL
      for (int c = 0; c < 4; ++c) a.o[i][place + c] = from.at[c];
    });
  });
}

/// For the whole warp: the threads of a row read what one of them writes.
template <int kGroups>
CP_DEVICE void store_states(const RowStates<kGroups>& a, const StripOfSlot& tile) {
  __syncwarp();
  for_each_row<kGroups>(tile.num_rows, [&](int i, int row) {
    if (Place{}.column == 0) {
      tile.slot.m[tile.first_state + row] = a.m[i];
      tile.slot.l[tile.first_state + row] = a.l[i];
    }
    for_each_quad<kGroups>(tile, row, [&](int place, Quad& to) {
      CP_UNROLL
      for (int c = 0; c < 4; ++c) to.at[c] = a.o[i][place + c];
    });
  });
  __syncwarp();
}

/// accumulator = merge of both, with the bits of merge_states (states.h).
template <SlotSide kSide, int kGroups>
CP_DEVICE void merge_states(RowStates<kGroups>& a, const StripOfSlot& tile) {
  constexpr bool kIsLeft = kSide == SlotSide::left;
  for_each_row<kGroups>(tile.num_rows, [&](int i, int row) {
    const float m_slot = tile.slot.m[tile.first_state + row];
    const float l_slot = tile.slot.l[tile.first_state + row];
    const float m_left = kIsLeft ? m_slot : a.m[i], m_right = kIsLeft ? a.m[i] : m_slot;
    const float l_left = kIsLeft ? l_slot : a.l[i], l_right = kIsLeft ? a.l[i] : l_slot;
    const float m = larger(m_left, m_right);
    const float safe_m = -INFINITY < m ? m : 0.0f;  // -inf - (-inf) is never formed
    const float w_left = exp2_nonpositive(m_left - safe_m);
    const float w_right = exp2_nonpositive(m_right - safe_m);
    a.m[i] = m;
    a.l[i] = fmaf(l_right, w_right, l_left * w_left);
    for_each_quad<kGroups>(tile, row, [&](int place, const Quad& other) {
      CP_UNROLL
      for (int c = 0; c < 4; ++c) {
        float& mine = a.o[i][place + c];
        const float left = kIsLeft ? other.at[c] : mine, right = kIsLeft ? mine : other.at[c];
        mine = fmaf(right, w_right, left * w_left);
      }
    });
  });
}

/// out and lse of the tile, with the bits of finalize_states (states.h). IsEmpty: of empty states,
/// whatever the accumulator holds.
template <bool kIsEmpty, int kGroups>
CP_DEVICE void finalize_states(const RowStates<kGroups>& a, const StripOfResult& tile) {
  const ResultRows& to = tile.rows;
  const int column = Place{}.column;
  for_each_row<kGroups>(tile.num_rows, [&](int i, int row) {
    const std::int64_t at = tile.first_row + row;
    const std::int64_t out = at * to.out_row_stride + tile.head * to.out_head_stride;
    const float l = kIsEmpty ? 0.0f : a.l[i];
    const float inverse = 1.0f / l;
    CP_UNROLL
    for (int c = 0; c < 4 * kGroups; ++c) {
      const int channel = c / 4 * kGroupChannels + 4 * column + c % 4;
      if (channel >= tile.value_dim) continue;
      // + 0: a zero of either sign becomes +0.
      const float result = l != 0.0f ? divide(a.o[i][c], l, inverse) + 0.0f : 0.0f;
      store_element(to.out, to.out_dtype, out + channel, result);
    }
    if (column == 0) {
      to.lse[at * to.lse_row_stride + tile.head * to.lse_head_stride] =
          kIsEmpty ? -INFINITY : natural_lse(a.m[i], l);
    }
  });
}

/// As that of accumulator.h, of the warp's rows.
template <int kGroups>
CP_DEVICE float largest_logit(const RowStates<kGroups>& a, int num_rows) {
  float best = -INFINITY;
  for_each_row<kGroups>(num_rows, [&](int i, int) {
    const bool is_nan = a.l[i] != a.l[i] && a.m[i] != INFINITY;
    best = larger_or_nan(is_nan ? a.l[i] : a.m[i], best);
  });
  best = larger_or_nan(__shfl_xor_sync(0xffffffffu, best, kSide), best);
  return static_cast<float>(static_cast<double>(best) * kLn2);
}

}  // namespace cpattn::cuda::f32
