// What the f32 kernels are made of: a thread block of 16 x 16 threads, and its two products, A B^T
// over channels and W B over rows, each a register tile per thread.
//
// Every element of a product is one chain of fmaf in one register, channels or rows ascending from
// 0: the order of kernels/cpu. Operands go through shared memory in pieces; how they are cut
// decides nothing. Surplus channels are zeros, which change no bit of a sum (but the sign of a
// zero).
#pragma once

#include <type_traits>

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/f32_form.h"
#include "kernels/cuda/forward_params.h"
#include "kernels/f32_engine.h"

namespace cpattn::cuda::f32 {

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  no_barrier_before_stage,
  no_barrier_after_stage,
  hidden_specials_multiplied,
  tiles_from_first_row,
  sums_not_reset,
};

inline constexpr int kSide = 16;
inline constexpr int kThreads = kSide * kSide;

/// The calling thread's place. Rows of a tile are row, row + 16, ..; channels of a row are four
/// from 4 * column on, four from 64 + 4 * column on, ..
struct Place {
  int row = static_cast<int>(threadIdx.x) / kSide;
  int column = static_cast<int>(threadIdx.x) % kSide;
};

/// Four neighbouring channels: what is moved at once.
struct CP_MAY_ALIAS Quad {
  alignas(16) float at[4];
};
CP_DEVICE Quad& quad_at(float* place) { return *reinterpret_cast<Quad*>(place); }
CP_DEVICE const Quad& quad_at(const float* place) { return *reinterpret_cast<const Quad*>(place); }

/// An element of q with the sign of the scale, or times a scale of 0.
CP_DEVICE float scaled(float x, const ScoreScale& scale) {
  if (scale.is_zero) {
    const bool is_finite = (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
    return is_finite ? 0.0f : __uint_as_float(0xffffffffu);
  }
  return scale.is_negative ? -x : x;
}

/// Rows in packed form; zeros beyond them.
struct PackedRows {
  const float* rows = nullptr;  ///< the first one
  int row_floats = 0;
  int num_rows = 0;

  CP_DEVICE Quad quad(int row, int channel) const {
    if (row >= num_rows || channel >= row_floats) return Quad{};
    return quad_at(rows + row * row_floats + channel);
  }
};

/// The rows from `first` on of `num_rows` of a head.
CP_DEVICE PackedRows rows_from(const float* rows, int dim, int first, int num_rows) {
  return {rows + std::int64_t{first} * row_floats(dim), row_floats(dim), num_rows - first};
}

/// Channels of both operands that are in shared memory at a time.
inline constexpr int kChunk = 32;
/// Eight rows' quads at one channel lie in 32 different banks.
inline constexpr int kChunkStride = kChunk + 4;

template <int kRows, class Rows>
CP_DEVICE void stage_chunk(const Rows& rows, int first_channel, float* stage) {
  constexpr int kQuads = kChunk / 4;
  CP_UNROLL_BY(1)  // unrolled, and registers are full of addresses
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kQuads; i += kThreads) {
    const int row = i / kQuads, channel = i % kQuads * 4;
    quad_at(stage + row * kChunkStride + channel) = rows.quad(row, first_channel + channel);
  }
}

template <int kRows, int kColumns>
CP_DEVICE void multiply_chunk(const float* a, const float* b, int channels,
                              float (&sum)[kRows][kColumns]) {
  const Place place;
  a += place.row * kChunkStride;
  b += place.column * kChunkStride;
  CP_UNROLL_BY(1)
  for (int channel = 0; channel < channels; channel += 4) {
    Quad x[kRows];
    CP_UNROLL
    for (int i = 0; i < kRows; ++i) x[i] = quad_at(a + i * kSide * kChunkStride + channel);
    CP_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      const Quad y = quad_at(b + j * kSide * kChunkStride + channel);
      CP_UNROLL
      for (int k = 0; k < 4; ++k) {
        CP_UNROLL
        for (int i = 0; i < kRows; ++i) sum[i][j] = fmaf(x[i].at[k], y.at[k], sum[i][j]);
      }
    }
  }
}

/// Floats of shared memory for dot_products.
template <int kRows, int kColumns>
inline constexpr int kDotStageFloats = (kRows + kColumns) * kSide* kChunkStride;

/// sum[i][j] = a(row + 16 i) . b(column + 16 j) over `dim` channels. For the whole block; begins
/// with a barrier, so `stage` may be in use until then.
template <Fault kFault = Fault::none, int kRows, int kColumns, class A, class B>
CP_DEVICE void dot_products(const A& a, const B& b, int dim, float* stage,
                            float (&sum)[kRows][kColumns]) {
  float* const b_stage = stage + kRows * kSide * kChunkStride;
  CP_UNROLL
  for (int i = 0; i < kRows; ++i) {
    CP_UNROLL
    for (int j = 0; j < kColumns; ++j) sum[i][j] = 0.0f;
  }
  for (int channel = 0; channel < dim; channel += kChunk) {
    if (kFault != Fault::no_barrier_before_stage) __syncthreads();
    stage_chunk<kRows * kSide>(a, channel, stage);
    stage_chunk<kColumns * kSide>(b, channel, b_stage);
    if (kFault != Fault::no_barrier_after_stage) __syncthreads();
    multiply_chunk(stage, b_stage, dim - channel < kChunk ? dim - channel : kChunk, sum);
  }
}

/// Channels of a row are held in groups of 64, by a thread four of each; kGroups is 1, 2 or 4.
inline constexpr int kGroupChannels = 4 * kSide;

/// Calls visit(integral_constant) with the groups that rows of `dim` channels have.
template <class Visit>
auto with_groups(std::int64_t dim, const Visit& visit) {
  if (dim <= kGroupChannels) return visit(std::integral_constant<int, 1>{});
  if (dim <= 2 * kGroupChannels) return visit(std::integral_constant<int, 2>{});
  return visit(std::integral_constant<int, 4>{});
}

/// Rows of a thread: fewer where they are long, so that they stay in registers.
template <int kGroups>
inline constexpr int kThreadRows = kGroups < 4 ? 4 : 2;
template <int kGroups>
inline constexpr int kTileRows = kThreadRows<kGroups>* kSide;

/// Whole rows that are in shared memory at a time, as many as fit.
inline constexpr int kRowStageFloats = 4096;
template <int kGroups>
inline constexpr int kStageRows = kRowStageFloats / (kGroups * kGroupChannels);

/// Rows [first_row, first_row + kStageRows).
template <int kGroups, class Rows>
CP_DEVICE void stage_rows(const Rows& rows, int first_row, float* stage) {
  constexpr int kQuads = kGroups * kSide;
  CP_UNROLL_BY(1)
  for (int i = static_cast<int>(threadIdx.x); i < kStageRows<kGroups> * kQuads; i += kThreads) {
    const int row = i / kQuads, channel = i % kQuads * 4;
    quad_at(stage + 4 * i) = rows.quad(first_row + row, channel);
  }
}

/// visit(i, row of the tile) for those of the thread's rows that exist.
template <int kGroups, class Visit>
CP_DEVICE void for_each_row(int num_rows, const Visit& visit) {
  const Place place;
  CP_UNROLL
  for (int i = 0; i < kThreadRows<kGroups>; ++i) {
    if (place.row + i * kSide < num_rows) visit(i, place.row + i * kSide);
  }
}

/// Keys of a thread in a tile of keys.
inline constexpr int kTileColumns = static_cast<int>(kKeyTile) / kSide;

/// Rows of weights [row][other] for a tile of keys, or of queries: two rows of a warp lie in
/// different banks.
inline constexpr int kWeightStride = static_cast<int>(kKeyTile) + kSide;
inline constexpr int kQueryWeightStride = static_cast<int>(kQueryTile);
static_assert(kWeightStride % 32 == kSide && kQueryWeightStride % 32 == kSide);

/// sum[i] += weights(row + 16 i, other) * stage(other) for others [first, first + count) of the
/// tile, the first of which is the first row of the stage. Masked: where not sees(i, other), they
/// are left out, not multiplied by their weight of 0, for 0 times NaN is not 0.
template <int kStride, bool kIsMasked, int kRows, int kChannels, class Sees>
CP_DEVICE void add_weighted(const float* weights, int first, int count, const float* stage,
                            const Sees& sees, float (&sum)[kRows][kChannels]) {
  constexpr int kGroups = kChannels / 4;
  const Place place;
  weights += place.row * kStride + first;
  stage += 4 * place.column;
  CP_UNROLL_BY(1)
  for (int other = 0; other < count; other += 4) {
    Quad weight[kRows];
    CP_UNROLL
    for (int i = 0; i < kRows; ++i) weight[i] = quad_at(weights + i * kSide * kStride + other);
    CP_UNROLL
    for (int k = 0; k < 4; ++k) {
      const float* const row = stage + (other + k) * kGroups * kGroupChannels;
      CP_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const Quad value = quad_at(row + g * kGroupChannels);
        CP_UNROLL
        for (int i = 0; i < kRows; ++i) {
          if (kIsMasked && !sees(i, first + other + k)) continue;
          CP_UNROLL
          for (int c = 0; c < 4; ++c) {
            sum[i][4 * g + c] = fmaf(weight[i].at[k], value.at[c], sum[i][4 * g + c]);
          }
        }
      }
    }
  }
}

/// sum[i] = sum of weights(row + 16 i, other) * rows(other) over the others [0, count) of a tile,
/// all weights of which are in shared memory, in rows of kStride. For the whole block; begins with
/// a barrier, behind which `weights` are read, so `stage` may be in use and `weights` be written
/// until then. `is_masked`: some sees() of the calling thread is false.
template <int kStride, Fault kFault = Fault::none, int kRows, int kChannels, class Rows, class Sees>
CP_DEVICE void sum_weighted(const float* weights, int count, const Rows& rows, bool is_masked,
                            const Sees& sees, float* stage, float (&sum)[kRows][kChannels]) {
  constexpr int kGroups = kChannels / 4;
  constexpr int kStaged = kStageRows<kGroups>;
  CP_UNROLL
  for (int i = 0; i < kRows; ++i) {
    CP_UNROLL
    for (int c = 0; c < kChannels; ++c) sum[i][c] = 0.0f;
  }
  for (int first = 0; first < count; first += kStaged) {
    if (kFault != Fault::no_barrier_before_stage) __syncthreads();
    stage_rows<kGroups>(rows, first, stage);
    if (kFault != Fault::no_barrier_after_stage) __syncthreads();
    const int staged = count - first < kStaged ? count - first : kStaged;
    if (is_masked && kFault != Fault::hidden_specials_multiplied) {
      add_weighted<kStride, true>(weights, first, staged, stage, sees, sum);
    } else {
      add_weighted<kStride, false>(weights, first, staged, stage, sees, sum);
    }
  }
}

}  // namespace cpattn::cuda::f32
