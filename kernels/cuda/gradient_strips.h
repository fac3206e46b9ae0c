// What the 16-bit backward kernels do with the registers of a warp: pairs weighed, sums of a
// *strip* of 16 rows met with slots, dq finished.
//
// Sums lie as tensor cores leave results (accumulator.h): with g = lane / 4 and t = lane % 4 a lane
// holds of rows g and g + 8 the channels 8 n + 2 t and the next one, as sums[n].
#pragma once

#include "kernels/cuda/accumulator.h"
#include "kernels/cuda/backward_params.h"

namespace cpattn::cuda {

/// p of one pair from its score. Rounding of lse may lift the exponent above 0, where a weight
/// cannot be: it is held there.
CP_DEVICE float weight_of(float scale_log2, float lse, float score) {
  const float exponent = fmaf(score, scale_log2, -lse);
  return ptx::exp2_approximate(exponent > 0.0f ? 0.0f : exponent);
}

/// p and ds of one pair from its score and dout.v, in their places. Of a hidden pair both are 0,
/// whatever they were.
CP_DEVICE void weigh_pair(float scale_log2, float lse, float delta, bool is_visible, float& score,
                          float& dot) {
  const float p = weight_of(scale_log2, lse, score);
  const float ds = p * (dot - delta);
  score = is_visible ? p : 0.0f;
  dot = is_visible ? ds : 0.0f;
}

template <int kTiles>
CP_DEVICE void clear_sums(float (&sums)[kTiles][4]) {
  CP_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
  }
}

/// Where the rows of a strip are in a slot.
struct StripOfSums {
  float* at = nullptr;  ///< of row 0
  int row_floats = 0;
  int num_rows = 0;  ///< that exist; of the others nothing is read or written
};

/// load, add and store of the lane's part of a strip.
template <int kTiles>
CP_DEVICE void execute_on_sums(GradientOpKind kind, const StripOfSums& strip,
                               float (&sums)[kTiles][4]) {
  const StripLane lane;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    float* const at = strip.at + std::int64_t{row} * strip.row_floats + lane.channel;
    CP_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      if (8 * n + lane.channel >= strip.row_floats) break;
      auto& pair = *reinterpret_cast<FloatPair*>(at + 8 * n);
      float &first = sums[n][2 * half], &second = sums[n][2 * half + 1];
      if (kind == GradientOpKind::store) {
        pair = {first, second};
      } else if (kind == GradientOpKind::add) {
        first += pair.first;
        second += pair.second;
      } else {
        first = pair.first;
        second = pair.second;
      }
    }
  }
}

/// A strip of keys against some rows of a q chunk.
struct KeyStrip {
  int first_key = 0;  ///< within the kv block
  int row = 0;        ///< the first of the rows, within the q chunk
  int limit = 0;      ///< row i of the q chunk sees keys [0, limit + i)

  /// Whether row `row + k` of the q chunk sees key i of the strip.
  CP_DEVICE bool sees(int i, int k) const { return first_key + i < limit + row + k; }
};

/// A strip of rows of a q chunk. A lane holds lse and delta of its rows g and g + 8.
struct RowStrip {
  int row = 0;        ///< of the strip's first row within the q chunk
  int num_rows = 0;   ///< that exist
  float lse[2] = {};  ///< in units of log2; -inf of rows that see no key
  float delta[2] = {};
};

/// The strip at row `row` of an item.
CP_DEVICE RowStrip row_strip(const BackwardParams& params, const RowItem& item, int row_of_item) {
  const StripLane lane;
  const QueryForm form = params.query_form();
  RowStrip strip;
  strip.row = item.first + row_of_item;
  strip.num_rows = item.rows->num_rows - strip.row;
  const std::byte* const head =
      item.rows->packed + item.head * form.head_bytes(item.rows->num_rows);
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = strip.row + lane.row + 8 * half;
    strip.lse[half] = -INFINITY;
    strip.delta[half] = 0.0f;
    if (row >= item.rows->num_rows) continue;
    const auto* const scalars = reinterpret_cast<const float*>(
        head + row / kTileRows * form.tile_bytes() + form.panel_bytes());
    strip.lse[half] = scalars[row % kTileRows];
    strip.delta[half] = scalars[kTileRows + row % kTileRows];
  }
  return strip;
}

/// Keys of a kv block that some rows see: row i of them sees [0, first + i), at most num_keys.
struct RowLimits {
  int first = 0;
  int num_keys = 0;

  CP_DEVICE int of_row(int i) const { return first + i < num_keys ? first + i : num_keys; }
  /// That any of the first `num_rows` rows sees.
  CP_DEVICE int of_any(int num_rows) const {
    const int limit = num_rows > 0 ? of_row(num_rows - 1) : 0;
    return limit > 0 ? limit : 0;
  }
};

/// load, add, store and finish of the lane's part of a strip of dq. finish: scaled once, rounded
/// once; zeros are +0.
template <int kTiles>
CP_DEVICE void execute_on_dq(const BackwardParams& params, const RowItem& item,
                             const GradientOp& op, const RowStrip& strip, float (&dq)[kTiles][4]) {
  if (op.kind != GradientOpKind::finish) {
    const int row_floats = params.slot_form.dk_floats();
    float* const slot = reinterpret_cast<float*>(params.dq_slots + op.slot * params.dq_slot_bytes);
    float* const at = slot + (item.head * params.dq_slot_rows + strip.row) * row_floats;
    return execute_on_sums(op.kind, {at, row_floats, strip.num_rows}, dq);
  }
  const StripLane lane;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    if (row >= strip.num_rows) continue;
    const bool is_used = strip.lse[half] != -INFINITY;
    const std::int64_t first = (item.rows->row_begin + strip.row + row) * params.dq_row_stride +
                               item.head * params.dq_head_stride + lane.channel;
    CP_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      CP_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (8 * n + lane.channel + i >= params.slot_form.head_dim) break;
        store_element(params.dq, params.dq_dtype, first + 8 * n + i,
                      is_used ? dq[n][2 * half + i] * params.scale + 0.0f : 0.0f);
      }
    }
  }
}

}  // namespace cpattn::cuda
