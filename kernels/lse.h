// The partial state of one (query row, head) and its algebra: what "merge" and "lse" mean, for
// every backend.
//
// State (m, l, o): m = max over visible keys of s * log2(e), where s = softmax_scale * q.k (so m is
// in units of log2);
//                  l = sum over visible keys of 2^(s * log2(e) - m);  o[Dv] = sum of 2^(s * log2(e)
//                  - m) * v.
// Empty            m = -inf, l = 0, o = 0: the neutral element, bit for bit, on either side.
// Result           out = o / l and lse = m * ln(2) + ln(l), the natural log of the sum of exp(s),
// in f32;
//                  an empty row gives out = 0, lse = -inf. Zeros of out are +0.
// Merge            of left a and right b (tree positions, never arrival order):
//                  m = max(m_a, m_b);  w_a = 2^(m_a - m), w_b = 2^(m_b - m);
//                  l = fma(l_b, w_b, l_a * w_a);  o = fma(o_b, w_b, o_a * w_a).
//
// Why unnormalised, and not (out, lse): at |lse| near 1e4 an f32 lse has a spacing of 1e-3, so
// weights exp(lse_a - lse) would be wrong in the fourth digit. m is an exact element of the logits
// and only differences of it are used. Source: online softmax (Milakov, Gimelshein 2018);
// FlashAttention-2 (Dao 2023) section 3.1.
#pragma once

#include <cmath>
#include <limits>

namespace cpattn {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;
inline constexpr float kEmptyMax = -std::numeric_limits<float>::infinity();

/// Weights of the two sides of a merge. Both sides empty: both weights are 0 and m stays -inf
/// (never -inf minus -inf).
struct MergeWeights {
  float m;
  float left;
  float right;
};

inline MergeWeights merge_weights(float m_left, float m_right) {
  const float m = m_left > m_right ? m_left : m_right;
  if (m == kEmptyMax) return {kEmptyMax, 0.0f, 0.0f};
  return {m, std::exp2(m_left - m), std::exp2(m_right - m)};
}

/// lse of a finished row: m * ln(2) + ln(l) in double, rounded once. Not inline: sources compiled
/// for wider instruction sets call it too, and must not leave copies of it behind.
float finalize_lse(float m, float l);

}  // namespace cpattn
