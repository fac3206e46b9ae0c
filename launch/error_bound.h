// How far an attention result may be from exact arithmetic: derived, never tried out.
//
// Measure: 2-norm over one head of one chunk, relative to the norm of the exact values. u = 2^-24.
// A rounding is off by at most u of its result, u / sqrt(3) in the root mean square; independent
// roundings add as squares. What rounding does to the sums of one row is one draw, so over r rows
// the root mean square itself deviates by 1 / sqrt(2 r) of it; four of these are allowed, and at
// least twice the root mean square in all: max(2, 1 + 4 / sqrt(2 r)), which is 2 from 8 rows on.
//
// 1. The path. n keys are added in tiles of T = 128, tiles to a running sum. A sum that stays where
//    it is (a dominant first term) takes one full rounding per addition: sqrt(T / 3) u in a tile,
//    sqrt(n / (3 T)) u over the tiles. A sum of weight x value with values around zero grows like a
//    random walk, so its roundings are half of that as squares: T / 6 and n / (6 T). Together
//      u sqrt((T + n / T) / 2),
//    4.8e-7 at the default chunk of 512, so that twice of it is the 1e-6 of docs/numerics.md's
//    contract (kPathBound), and no group is held to less. n is what one accumulator
//    takes: the keys of a chunk under the canonical schedule, all of them under arrival.
// 2. Large logits. A weight is exp(s), so an absolute error ds of a logit is a relative error of
// its
//    weight. s is a sum of D products in one accumulator: the k-th addition rounds a partial sum
//    that has grown to |s| k / D. As squares:
//      ds = u |s| sqrt(sum_k (k / D)^2) / sqrt(3) = u |s| sqrt(D / 3) / sqrt(3) = u |s| sqrt(D)
//      / 3.
//    Two competing keys have independent errors, sqrt(2) ds between them: u L sqrt(2 D) / 3, L
//    being the magnitude of the logits that carry weight, |s| averaged over a row with its weights.
//    The larger of 1 and 2 is the bound of out.
// 3. lse moves by ds too, and is rounded once: (sqrt(D) / 3 u L + u |lse|) / |lse|, twice of which
// is
//    below 13 u for D <= 256 and |lse| >= L: kPathBound, 16.8 u, covers it. Where |lse| < 1 the
//    error is measured against 1, because an absolute error of lse is a relative error of the sum
//    of exponentials.
// 4. bf16 weights. Kernels with a bf16 dot product round each weight to 8 significant bits, a
//    relative error of at most 2^-8 (root mean square 2^-9.3), and sum the rounded weights. What
//    all weights of a row have in common cancels in out = sum(p v) / sum(p); the rest is
//    independent and adds as squares, like the terms of out itself, so 2^-8 of the result bounds
//    it. The sum of weights is off by at most 2^-8, and therefore lse by at most 2^-8 absolutely.
// 5. 16-bit output. One rounding of the exact result is allowed for, times 1.25.
#pragma once

#include <cstdint>

#include "src/base/dtype.h"

namespace cpattn {

inline constexpr double kPathBound = 1e-6;
inline constexpr double kUnitRoundoff = 0x1p-24;
inline constexpr double kWeightRounding = 0x1p-8;
inline constexpr double kOutputRoundingShare = 1.25;

/// What the bounds depend on, besides the inputs.
struct Arithmetic {
  std::int64_t head_dim = 64;
  std::int64_t run_keys = 512;  ///< keys that one accumulator takes, at most
  bool rounds_weights = false;  ///< to bf16, before they meet the values
};

/// One head of one chunk, as far as it was compared.
struct BoundedGroup {
  std::int64_t rows = 512;
  double logit_magnitude = 0.0;  ///< of the logits that carry weight
};

/// Relative bound of out in a group.
double out_bound(const Arithmetic& arithmetic, const BoundedGroup& group);

/// Relative bound of lse (against max(|lse|, 1)).
double lse_bound(const Arithmetic& arithmetic, const BoundedGroup& group);

}  // namespace cpattn
