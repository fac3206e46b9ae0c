// Scores of a strip of 16 query rows over a step of keys, and how they become weights: what the
// forward kernels do between their two products. Source: FlashAttention-2 (Dao 2023), algorithm 1.
//
// Scores lie as accumulators do (accumulator.h), key for channel: s[n][i] is that of row g (i < 2)
// or g + 8 and key 8 n + 2 t + i % 2.
#pragma once

#include "kernels/cuda/accumulator.h"

namespace cpattn::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Keys of the step at hand that some rows see: row i sees [0, first + i), at most `num_keys`.
struct Visible {
  int first = 0;     ///< may be negative, or beyond the step
  int num_keys = 0;  ///< of the block from this step on
  int num_rows = 0;  ///< that exist

  CP_DEVICE int of_row(int row) const { return first + row < num_keys ? first + row : num_keys; }
  /// That any row sees; 0 without rows.
  CP_DEVICE int of_any() const { return num_rows > 0 ? of_row(num_rows - 1) : 0; }
  CP_DEVICE int of_all() const { return of_row(0); }
};

/// Scores of hidden pairs become -inf. `visible` is that of the strip.
template <int kKeyTiles>
CP_DEVICE void hide_keys(const Visible& visible, float (&s)[kKeyTiles][4]) {
  const StripLane lane;
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int limit = visible.of_row(lane.row + i / 2 * 8);
    CP_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      if (8 * n + lane.channel + i % 2 >= limit) s[n][i] = -INFINITY;
    }
  }
}

/// Scores to weights 2^(s scale - m), m to the new maximum, and what the state has been divided by
/// since: alpha. l is the lane's share.
template <int kKeyTiles, class State>
CP_DEVICE void weigh_keys(float scale, State& state, float (&s)[kKeyTiles][4], float (&alpha)[2]) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    float best = -INFINITY;
    CP_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      best = fmaxf(best, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
    const float m = fmaxf(state.m[half], best * scale);
    // A row that has seen nothing yet keeps m = -inf; its weights are taken against 0, so they are
    // 0.
    const float safe_m = -INFINITY < m ? m : 0.0f;
    alpha[half] = ptx::exp2_approximate(state.m[half] - safe_m);
    state.m[half] = m;
    float sum = 0.0f;
    CP_UNROLL
    for (int n = 0; n < kKeyTiles; ++n) {
      CP_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        s[n][i] = ptx::exp2_approximate(fmaf(s[n][i], scale, -safe_m));
        sum += s[n][i];
      }
    }
    state.l[half] = fmaf(state.l[half], alpha[half], sum);
  }
}

/// o times alpha.
template <int kPanels>
CP_DEVICE void rescale(Accumulator<kPanels>& a, const float (&alpha)[2]) {
  CP_UNROLL
  for (int n = 0; n < Accumulator<kPanels>::kColumnTiles; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) a.o[n][i] *= alpha[i / 2];
  }
}

/// Weights of keys [16 step, 16 step + 16), rounded, as the left operand of a product (ptx.h).
template <class T, int kKeyTiles>
CP_DEVICE void round_weights(const float (&s)[kKeyTiles][4], int step, std::uint32_t (&p)[4]) {
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float(&pair)[4] = s[2 * step + i / 2];
    p[i] = ptx::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1], T{});
  }
}

/// Between these two l is a sum of shares: that of the row's first lane holds what came before.
template <int kPanels>
CP_DEVICE void share_sums(Accumulator<kPanels>& a) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (threadIdx.x % 4 != 0) a.l[half] = 0.0f;
  }
}
template <int kPanels>
CP_DEVICE void add_shares(Accumulator<kPanels>& a) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    a.l[half] += __shfl_xor_sync(kAllLanes, a.l[half], 1);
    a.l[half] += __shfl_xor_sync(kAllLanes, a.l[half], 2);
  }
}

}  // namespace cpattn::cuda
