// The accumulator of the forward kernels: states (m, l, o) of a *strip* of 16 query rows in the
// registers of a warp, as tensor cores leave results (mma.m16n8k16; wgmma gives each warp of its
// four the same); and what a tile program does with it besides attending.
//
// With g = lane / 4 and t = lane % 4 a lane holds of rows g and g + 8 the channels 8 n + 2 t and
// the next one. The four lanes of a row hold equal m and l. To meet memory, o goes through a
// *stage* in shared memory, a row at a time: rows of slots and of the caller are read and written
// side by side, by loops of a few instructions that need no registers of their own.
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
  int row;      ///< g
  int channel;  ///< 2 t

  CP_DEVICE StripLane() {
    const auto lane = static_cast<int>(ptx::thread() % 32);
    row = lane / 4;
    channel = lane % 4 * 2;
  }
};

/// Shared memory of a warp for the o of a strip, 16-byte aligned. Groups of 8 channels are permuted
/// by the row, so that the lanes of a fragment lie in different banks.
struct Stage {
  float* memory = nullptr;
  int row_floats = 0;  ///< whole panels: 64 for each of v

  CP_DEVICE float* at(int row, int channel) const {
    return memory + row * row_floats + ((channel / 8 ^ row % 8) * 8 + channel % 8);
  }
};
CP_SHARED_BY_HOST constexpr int stage_bytes(int v_panels) {
  return kStripRows * 64 * v_panels * static_cast<int>(sizeof(float));
}

struct CP_MAY_ALIAS FloatPair {
  alignas(8) float first;
  float second;
};
struct CP_MAY_ALIAS FloatPiece {
  alignas(16) float value[4];
};
inline constexpr int kPieceFloats = 4;

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

/// o to the stage. For the whole warp, as everything from here on.
template <int kPanels>
CP_DEVICE void put_on_stage(const Accumulator<kPanels>& a, const Stage& stage) {
  const StripLane lane;
  __syncwarp();  // nobody reads what was there
  CP_UNROLL
  for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
    if (8 * n >= stage.row_floats) break;
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<FloatPair*>(stage.at(lane.row + 8 * half, 8 * n + lane.channel)) = {
          a.o[n][2 * half], a.o[n][2 * half + 1]};
    }
  }
  __syncwarp();
}

/// The stage's o of those rows and channels that a slot has; others stay as they are.
template <int kPanels>
CP_DEVICE void take_from_stage(Accumulator<kPanels>& a, const Stage& stage,
                               const StripOfSlot& strip) {
  const StripLane lane;
  __syncwarp();
  CP_UNROLL
  for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half, channel = 8 * n + lane.channel;
      if (row >= strip.num_rows || channel >= strip.padded_dim) continue;
      const FloatPair pair = *reinterpret_cast<const FloatPair*>(stage.at(row, channel));
      a.o[n][2 * half] = pair.first;
      a.o[n][2 * half + 1] = pair.second;
    }
  }
}

/// visit(place on the stage, place in the slot) for the lane's pieces of o of one row.
template <class Visit>
CP_DEVICE void for_each_piece(const StripOfSlot& strip, const Stage& stage, int row,
                              const Visit& visit) {
  const int lane = static_cast<int>(ptx::thread() % 32);
  float* const in_slot = strip.slot.o + (strip.first_state + row) * strip.padded_dim;
  CP_UNROLL_BY(1)
  for (int channel = kPieceFloats * lane; channel < strip.padded_dim;
       channel += 32 * kPieceFloats) {
    visit(*reinterpret_cast<FloatPiece*>(stage.at(row, channel)),
          *reinterpret_cast<FloatPiece*>(in_slot + channel));
  }
}

/// Rows of a strip that exist, given how many there are from its first on.
CP_DEVICE int rows_of_strip(int num_rows) { return num_rows < kStripRows ? num_rows : kStripRows; }

/// What the lanes of row `row` of a strip hold: `halves` for their two rows.
CP_DEVICE float of_row(const float (&halves)[2], int row) {
  return __shfl_sync(0xffffffffu, row < 8 ? halves[0] : halves[1], row % 8 * 4);
}

/// Rows that do not exist become empty states.
template <int kPanels>
CP_DEVICE void load_states(Accumulator<kPanels>& a, const StripOfSlot& strip, const Stage& stage) {
  const StripLane lane;
  clear(a);
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    a.m[half] = strip.slot.m[strip.first_state + row];
    a.l[half] = strip.slot.l[strip.first_state + row];
  }
  __syncwarp();
  CP_UNROLL_BY(1)
  for (int row = 0; row < rows_of_strip(strip.num_rows); ++row) {
    for_each_piece(strip, stage, row,
                   [](FloatPiece& staged, const FloatPiece& in_slot) { staged = in_slot; });
  }
  take_from_stage(a, stage, strip);
}

template <int kPanels>
CP_DEVICE void store_states(const Accumulator<kPanels>& a, const StripOfSlot& strip,
                            const Stage& stage) {
  const StripLane lane;
  put_on_stage(a, stage);
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows || lane.channel != 0) continue;
    strip.slot.m[strip.first_state + row] = a.m[half];
    strip.slot.l[strip.first_state + row] = a.l[half];
  }
  CP_UNROLL_BY(1)
  for (int row = 0; row < rows_of_strip(strip.num_rows); ++row) {
    for_each_piece(strip, stage, row,
                   [](const FloatPiece& staged, FloatPiece& in_slot) { in_slot = staged; });
  }
  __syncwarp();  // lanes may read what others wrote
}

/// Which side of a merge the slot is.
enum class SlotSide { left, right };

/// accumulator = merge of both, with the bits of merge_states (states.h).
template <int kPanels>
CP_DEVICE void merge_states(Accumulator<kPanels>& a, const StripOfSlot& strip, SlotSide side,
                            const Stage& stage) {
  const bool is_left = side == SlotSide::left;
  const StripLane lane;
  put_on_stage(a, stage);
  float w_left[2] = {}, w_right[2] = {};
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    const float m_slot = strip.slot.m[strip.first_state + row];
    const float l_slot = strip.slot.l[strip.first_state + row];
    const float m_left = is_left ? m_slot : a.m[half], m_right = is_left ? a.m[half] : m_slot;
    const float l_left = is_left ? l_slot : a.l[half], l_right = is_left ? a.l[half] : l_slot;
    const float m = larger(m_left, m_right);
    const float safe_m = -INFINITY < m ? m : 0.0f;  // -inf - (-inf) is never formed
    w_left[half] = exp2_nonpositive(m_left - safe_m);
    w_right[half] = exp2_nonpositive(m_right - safe_m);
    a.m[half] = m;
    a.l[half] = fmaf(l_right, w_right[half], l_left * w_left[half]);
  }
  CP_UNROLL_BY(1)
  for (int row = 0; row < rows_of_strip(strip.num_rows); ++row) {
    const float of_left = of_row(w_left, row), of_right = of_row(w_right, row);
    for_each_piece(strip, stage, row, [&](FloatPiece& staged, const FloatPiece& in_slot) {
      const FloatPiece left = is_left ? in_slot : staged, right = is_left ? staged : in_slot;
      CP_UNROLL
      for (int i = 0; i < kPieceFloats; ++i) {
        staged.value[i] = fmaf(right.value[i], of_right, left.value[i] * of_left);
      }
    });
  }
  take_from_stage(a, stage, strip);
}

/// Where the results of a strip go: row 0 of it is row `first_row` of the tensors.
struct StripOfResult {
  ResultRows rows;
  std::int64_t first_row = 0;
  std::int64_t head = 0;
  int value_dim = 0;
  int num_rows = 0;  ///< that exist
};

/// Two neighbouring elements of a 16-bit type.
struct CP_MAY_ALIAS ElementPair {
  std::uint32_t bits;
};

/// Elements `at` and the next one, the second only if there is one.
CP_DEVICE void store_pair(const ResultRows& to, std::int64_t at, float first, float second,
                          bool has_second) {
  std::uint16_t* const place = static_cast<std::uint16_t*>(to.out) + at;
  if (to.out_dtype != DType::f32 && has_second &&
      reinterpret_cast<std::uintptr_t>(place) % sizeof(ElementPair) == 0) {
    reinterpret_cast<ElementPair*>(place)->bits = to.out_dtype == DType::f16
                                                      ? ptx::pack(first, second, f16{})
                                                      : ptx::pack(first, second, bf16{});
    return;
  }
  store_element(to.out, to.out_dtype, at, first);
  if (has_second) store_element(to.out, to.out_dtype, at + 1, second);
}

/// out and lse of a strip, with the bits of finalize_states (states.h).
template <int kPanels>
CP_DEVICE void finalize_states(const Accumulator<kPanels>& a, const StripOfResult& strip,
                               const Stage& stage) {
  const StripLane lane;
  const ResultRows& to = strip.rows;
  put_on_stage(a, stage);
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows || lane.channel != 0) continue;
    to.lse[(strip.first_row + row) * to.lse_row_stride + strip.head * to.lse_head_stride] =
        natural_lse(a.m[half], a.l[half]);
  }
  CP_UNROLL_BY(1)
  for (int row = 0; row < rows_of_strip(strip.num_rows); ++row) {
    const float l = of_row(a.l, row), inverse = 1.0f / l;
    // + 0: a zero of either sign becomes +0.
    const auto result = [&](float o) { return l != 0.0f ? divide(o, l, inverse) + 0.0f : 0.0f; };
    const std::int64_t first =
        (strip.first_row + row) * to.out_row_stride + strip.head * to.out_head_stride;
    CP_UNROLL_BY(1)
    for (int channel = static_cast<int>(ptx::thread() % 32) * 2; channel < strip.value_dim;
         channel += 64) {
      const FloatPair o = *reinterpret_cast<const FloatPair*>(stage.at(row, channel));
      store_pair(to, first + channel, result(o.first), result(o.second),
                 channel + 1 < strip.value_dim);
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
