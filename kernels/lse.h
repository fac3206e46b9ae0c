// The partial state of one (query row, head) and its algebra: what "merge" and "lse" mean, for
// every backend.
//
// State   (m, l, o), with t = softmax_scale * log2(e) * q.k of each visible key:
//         m = max t (in units of log2), l = sum of 2^(t - m), o[Dv] = sum of 2^(t - m) * v.
// Empty   m = -inf, l = 0, o = 0: the neutral element, bit for bit, on either side.
// Result  out = o / l and lse = m * ln(2) + ln(l), the natural log of the sum of exp(scaled
//         logits), in f32; an empty row gives out = 0, lse = -inf. Zeros of out are +0.
// Merge   of left a and right b (tree positions, never arrival order):
//         m = max(m_a, m_b);  w_a = 2^(m_a - m), w_b = 2^(m_b - m), both 0 when both are empty;
//         l = fma(l_b, w_b, l_a * w_a);  o = fma(o_b, w_b, o_a * w_a).
//
// Why unnormalised, and not (out, lse): at |lse| near 1e4 an f32 lse has a spacing of 1e-3, so
// weights exp(lse_a - lse) would be wrong in the fourth digit. m is an exact element of the logits
// and only differences of it are used.
// Source: online softmax (Milakov, Gimelshein 2018); FlashAttention-2 (Dao 2023) section 3.1.
#pragma once

#include <limits>

namespace cpattn {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;
inline constexpr float kEmptyMax = -std::numeric_limits<float>::infinity();

/// lse of a finished row: m * ln(2) + ln(l) in double, rounded once. Not inline: sources compiled
/// for wider instruction sets call it too, and must not leave copies of it behind.
float finalize_lse(float m, float l);

}  // namespace cpattn
