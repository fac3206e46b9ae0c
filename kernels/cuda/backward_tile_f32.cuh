// What the two kernels of backward_f32.h share: operands, p and ds of a pair, sums of a tile.
//
// A thread block owns a tile of rows (of q, or of k and v), of which a thread has some rows and
// channels as Place says. Own rows times others are the products S and dP; what is made of them
// goes to shared memory as weights [own row][other], and weights times others to sums in registers.
#pragma once

#include "kernels/cuda/backward_params.h"
#include "kernels/cuda/f32_tile.cuh"

namespace cpattn::cuda::f32 {

/// Head sizes of up to 64 kGroups channels. Chosen so that registers do not spill. Bits do not
/// depend on it.
template <int kGroups_, Fault kFault_ = Fault::none>
struct GradientConfig {
  static constexpr int kGroups = kGroups_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kRows = kThreadRows<kGroups>;  ///< of a thread
  static constexpr int kOwnRows = kTileRows<kGroups>;
};

struct BackwardF32Params {
  BackwardParams common;
  ScoreScale scale;
  RowForm form;
};

inline BackwardF32Params f32_params(const AttentionShape& shape, const BackwardParams& common) {
  return {common, score_scale(shape.softmax_scale), form_of(shape)};
}

/// A thread's part of the sums of a tile.
template <class C>
using TileSums = float[C::kRows][4 * C::kGroups];

/// One head of a packed q chunk.
struct QueryHead {
  const float* q;
  const float* dout;
  const float* lse;  ///< in units of log2; -inf of rows that saw no key
  const float* delta;
};

CP_DEVICE QueryHead query_head(const BackwardF32Params& params, const GradientRows& rows,
                               int head) {
  const RowForm& form = params.form;
  const QueryParts parts = query_parts(form, params.common.num_heads, rows.num_rows);
  const float* const packed = reinterpret_cast<const float*>(rows.packed);
  const std::int64_t first = std::int64_t{head} * rows.num_rows;
  return {packed + form.first_floats(first), packed + parts.dout + form.second_floats(first),
          packed + parts.lse + first, packed + parts.delta + first};
}

/// One head of a packed kv chunk.
struct KeyHead {
  const float* k;
  const float* v;
};

CP_DEVICE KeyHead key_head(const BackwardF32Params& params, const GradientKeys& keys, int head) {
  const RowForm& form = params.form;
  const float* const k =
      reinterpret_cast<const float*>(keys.packed) + head * form.kv_floats(keys.num_keys);
  return {k, k + form.first_floats(keys.num_keys)};
}

/// Rows of q with the sign of the scale.
struct SignedRows {
  PackedRows q;
  ScoreScale scale;

  CP_DEVICE Quad quad(int row, int channel) const {
    Quad result = q.quad(row, channel);
    CP_UNROLL
    for (int c = 0; c < 4; ++c) result.at[c] = scaled(result.at[c], scale);
    return result;
  }
};

/// p and ds of one pair from its score and dout.v, in their places. Rounding of lse may lift the
/// exponent above 0, where a weight cannot be: it is held there. Of a hidden pair both are 0,
/// whatever they were.
CP_DEVICE void weigh_pair(float multiplier, float lse, float delta, bool is_visible, float& score,
                          float& dot) {
  const float p = exp2_nonpositive(smaller(0.0f, fmaf(score, multiplier, -lse)));
  const float ds = p * (dot - delta);
  score = is_visible ? p : 0.0f;
  dot = is_visible ? ds : 0.0f;
}

template <class C>
CP_DEVICE void clear(TileSums<C>& sums) {
  CP_UNROLL
  for (int i = 0; i < C::kRows; ++i) {
    CP_UNROLL
    for (int c = 0; c < 4 * C::kGroups; ++c) sums[i][c] = 0.0f;
  }
}

/// sums += the sum of one tile of others.
template <class C>
CP_DEVICE void add(const TileSums<C>& more, TileSums<C>& sums) {
  CP_UNROLL
  for (int i = 0; i < C::kRows; ++i) {
    CP_UNROLL
    for (int c = 0; c < 4 * C::kGroups; ++c) sums[i][c] += more[i][c];
  }
}

/// Where the own rows of a tile are in a slot; of those that do not exist nothing is read or
/// written.
struct RowsOfSlot {
  float* at = nullptr;  ///< the first one
  int row_floats = 0;
  int num_rows = 0;
};

/// load, add and store of the thread's part.
template <class C>
CP_DEVICE void execute_on_sums(GradientOpKind kind, const RowsOfSlot& rows, TileSums<C>& sums) {
  const int first = 4 * Place{}.column;
  for_each_row<C::kGroups>(rows.num_rows, [&](int i, int row) {
    float* const at = rows.at + std::int64_t{row} * rows.row_floats + first;
    CP_UNROLL
    for (int g = 0; g < C::kGroups; ++g) {
      if (g * kGroupChannels + first >= rows.row_floats) continue;
      Quad& quad = quad_at(at + g * kGroupChannels);
      CP_UNROLL
      for (int c = 0; c < 4; ++c) {
        float& sum = sums[i][4 * g + c];
        if (kind == GradientOpKind::store) {
          quad.at[c] = sum;
        } else if (kind == GradientOpKind::add) {
          sum += quad.at[c];
        } else {
          sum = quad.at[c];
        }
      }
    }
  });
}

}  // namespace cpattn::cuda::f32
