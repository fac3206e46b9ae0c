// The accumulator of the forward kernels: states (m, l, o) of a *strip* of 16 query rows in the
// registers of a warp, as tensor cores leave results (mma.m16n8k16; wgmma gives each warp of its
// four the same); and what a tile program does with it besides attending.
//
// With g = lane / 4 and t = lane % 4 a lane holds of rows g and g + 8 the channels 8 n + 2 t and
// the next one. The four lanes of a row hold equal m and l.
#pragma once

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/states.h"

namespace cpattn::cuda {

inline constexpr int kStripRows = 16;

template <int kPanels>
struct Accumulator {
  static constexpr int kColumnTiles = 8 * kPanels;  ///< of 8 channels
  float m[2];
  float l[2];
  float o[kColumnTiles][4];  ///< (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
};

/// Where the rows of a strip are in a slot.
struct StripOfSlot {
  StateSlot slot;
  std::int64_t first_state = 0;
  std::int64_t padded_dim = 0;
  int num_rows = 0;  ///< that exist; of the others nothing is read or written
};

/// The calling lane's part of a strip.
struct StripLane {
  int row = static_cast<int>(threadIdx.x) % 32 / 4;       ///< g
  int channel = 2 * (static_cast<int>(threadIdx.x) % 4);  ///< 2 t
};

/// Two neighbouring floats of a state.
struct CP_MAY_ALIAS FloatPair {
  alignas(8) float first;
  float second;
};

template <int kPanels>
CP_DEVICE void clear(Accumulator<kPanels>& a) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    a.m[half] = -INFINITY;
    a.l[half] = 0.0f;
  }
  CP_UNROLL
  for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) a.o[n][i] = 0.0f;
  }
}

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
    for_each_pair<kPanels>(strip, row, lane, [&](int n, const FloatPair& from) {
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
    for_each_pair<kPanels>(strip, row, lane, [&](int n, FloatPair& to) {
      to = {a.o[n][2 * half], a.o[n][2 * half + 1]};
    });
  }
  __syncwarp();
}

/// Which side of a merge the slot is.
enum class SlotSide { left, right };

/// accumulator = merge of both, with the bits of merge_states (states.h).
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
    for_each_pair<kPanels>(strip, row, lane, [&](int n, const FloatPair& other) {
      a.o[n][2 * half] = merged(a.o[n][2 * half], other.first);
      a.o[n][2 * half + 1] = merged(a.o[n][2 * half + 1], other.second);
    });
  }
}

/// Where the results of a strip go: row 0 of it is row `first_row` of the tensors.
struct StripOfResult {
  ResultRows rows;
  std::int64_t first_row = 0;
  std::int64_t head = 0;
  int value_dim = 0;
  int num_rows = 0;  ///< that exist
};

/// Two neighbouring elements of a row of a 16-bit type, and the row's alignment for them.
struct CP_MAY_ALIAS ElementPair {
  std::uint32_t bits;
};

/// out and lse of a strip, with the bits of finalize_states (states.h).
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

/// The largest logit of the strip's rows, on every lane; NaN if any logit is NaN. A merge may lose
/// the NaN of m, never that of l; without one, a NaN in l comes of an infinite m.
template <int kPanels>
CP_DEVICE float largest_logit(const Accumulator<kPanels>& a, int num_rows) {
  const StripLane lane;
  float best = -INFINITY;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (lane.row + 8 * half >= num_rows) continue;
    const bool is_nan = a.l[half] != a.l[half] && a.m[half] != INFINITY;
    best = larger_or_nan(is_nan ? a.l[half] : a.m[half], best);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    best = larger_or_nan(__shfl_xor_sync(0xffffffffu, best, distance), best);
  }
  return static_cast<float>(static_cast<double>(best) * kLn2);
}

/// maximum = the larger one, where many threads do this: by compare and swap, since a maximum has
/// no rounding and so no order. A NaN wins and stays.
CP_DEVICE void raise_maximum(float* maximum, float value) {
  auto* const word = reinterpret_cast<unsigned*>(maximum);
  unsigned expected = __float_as_uint(-INFINITY);
  while (value > __uint_as_float(expected) || value != value) {
    const unsigned found = atomicCAS(word, expected, __float_as_uint(value));
    if (found == expected || __uint_as_float(found) != __uint_as_float(found)) return;
    expected = found;
  }
}

}  // namespace cpattn::cuda
