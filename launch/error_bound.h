// How far an attention result may be from exact arithmetic: derived, never tried out.
//
// Measure: 2-norm over one head of one chunk, relative to the norm of the exact values. u = 2^-24.
//
// 1. The path. The contract of docs/numerics.md for a result computed in f32 is kPathBound = 1e-6
//    with sums of up to kPathRun = 512 keys (the default chunk) in one accumulator. Where it comes
//    from: adding n terms rounds every partial sum by at most u of it, 1/sqrt(3) of that in the
//    root mean square. The sum of weights grows evenly, so its error is u sqrt(n) / 3; a sum of
//    weight x value with values around zero grows like a random walk, so its error is u sqrt(n /
//    6). Together 0.53 u sqrt(n): 7.1e-7 at n = 512, and with the square root of n beyond it. So
//    the path may be off by kPathBound * max(1, sqrt(n / kPathRun)), n being the keys one
//    accumulator takes: those of a chunk under the canonical schedule, all of them under arrival.
// 2. Large logits. A weight is exp(s), so an absolute error ds of a logit is a relative error of
// its
//    weight. s is a sum of D products in one accumulator: the k-th addition rounds a partial sum
//    that has grown to |s| k / D, by at most u times that, 1 / sqrt(3) of it in the root mean
//    square. Independent roundings add as squares:
//      ds = u |s| sqrt(sum_k (k / D)^2) / sqrt(3) = u |s| sqrt(D / 3) / sqrt(3) = u |s| sqrt(D)
//      / 3.
//    Two competing keys have independent errors, sqrt(2) ds between them: sqrt(2 D) / 3 * u * L.
//    L is the magnitude of the logits that carry weight. They lie within ln(n) of the log-mean-exp
//    lse - ln(n) of their row (n visible keys), so L = max over the rows of the group of
//    |lse - ln(n)|; logits far below it are large only where their weight is zero. The larger of 1
//    and 2 is the bound of out.
// 3. lse itself moves by ds too, and is rounded once: (sqrt(D) / 3 u L + u |lse|) / |lse|, which is
//    below 6.4 u for D <= 256 and |lse| >= L: kPathBound covers it. Where |lse| < 1 the error is
//    measured against 1, because an absolute error of lse is a relative error of the sum of
//    exponentials.
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
inline constexpr std::int64_t kPathRun = 512;
inline constexpr double kUnitRoundoff = 0x1p-24;
inline constexpr double kWeightRounding = 0x1p-8;
inline constexpr double kOutputRoundingShare = 1.25;

/// What the bounds depend on, besides the inputs.
struct Arithmetic {
  std::int64_t head_dim = 64;
  std::int64_t run_keys = kPathRun;  ///< keys that one accumulator takes, at most
  bool rounds_weights = false;       ///< to bf16, before they meet the values
};

/// Relative bound of out in a group whose rows have |lse - ln(visible keys)| <= logit_magnitude.
double out_bound(const Arithmetic& arithmetic, double logit_magnitude);

/// Relative bound of lse (against max(|lse|, 1)).
double lse_bound(const Arithmetic& arithmetic);

}  // namespace cpattn
