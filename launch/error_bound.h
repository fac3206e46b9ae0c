// How far out, lse and gradients may be from exact arithmetic: derived, never tried out.
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
//    its weight. s is a sum of D products in one accumulator: the k-th addition rounds a partial
//    sum that has grown to |s| k / D. As squares:
//      ds = u |s| sqrt(sum_k (k / D)^2) / sqrt(3) = u |s| sqrt(D / 3) / sqrt(3)
//         = u |s| sqrt(D) / 3.
//    Two competing keys have independent errors, sqrt(2) ds between them: u L sqrt(2 D) / 3, L
//    being the magnitude of the logits that carry weight, |s| averaged over a row with its weights.
//    The larger of 1 and 2 is the bound of out.
// 3. lse moves by ds too, and is rounded once: (sqrt(D) / 3 u L + u |lse|) / |lse|, twice of which
//    is below 13 u for D <= 256 and |lse| >= L: kPathBound, 16.8 u, covers it. Where |lse| < 1 the
//    error is measured against 1, because an absolute error of lse is a relative error of the sum
//    of exponentials. A logit whose products cancel is a random walk of its parts, as in 6, and
//    then off by more than its size says: sqrt(D / 6 + 1) u sqrt(L^2 + parts^2), times the factor
//    above, is allowed absolutely. Likewise out is measured by its terms p v where these cancel
//    and leave less than sqrt(sum (p |v|)^2).
// 4. 16-bit weights. Kernels with a 16-bit product round each weight to bf16 or f16, 8 or 11
//    significant bits: a relative error of at most w = 2^-8 or 2^-11 (root mean square about
//    0.4 w). They sum the rounded weights. What all weights of a row have in common cancels in
//    out = sum(p v) / sum(p); the rest is independent and adds as squares, like the terms of out
//    itself, so w of the result bounds it. The sum of weights is off by at most w, and therefore
//    lse by at most w absolutely.
// 5. 16-bit results. One rounding of the exact result is allowed for, times 1.25.
// 6. Gradients. A row of dq, dk or dv is a sum of terms ds k, ds q or p dout. Terms of either sign
//    may cancel, so their errors are measured by the terms, not by the sum: how far the sum moves
//    when a part of every term is off by its own size, independently, is its Sensitivity
//    (kernels/reference/gradient.h). What the kernels do to these parts, in the root mean square:
//      weight   2^x is off by at most 2e-7 = 3.4 u; p, dout.v - delta, their product and the result
//               are rounded: 3.6 u together. The sum itself is a path as in 1, with tiles of T = 48
//               rows for dk and dv: sqrt((T + n / T) / 2) u.
//      logit    a sum of D products grows steadily as in 2 (sqrt(D) / 3 u of itself) or is a random
//               walk of its parts (sqrt(D / 6) u of them), and is rounded on its way into 2^x:
//               sqrt(D / 6 + 1) u. lse moves with the logits that carry its weight.
//      lse      is rounded, turned into units of log2, and subtracted: three roundings, 1 u.
//      product  dout.v, as a logit: sqrt(Dv / 6) u.
//      delta    likewise, and every out in it went a path: sqrt(Dv / 6 + (T + n / T) / 2) u; a
//               16-bit out was rounded on the way: half its epsilon, / sqrt(3) as for u.
//    With 16-bit weights (4) p or ds is rounded once more, and lse and out come of rounded weights:
//    w / sqrt(3) each, so weight has it twice and delta once.
//    The five add as squares, and so do rows. Errors that the terms of a row have in common (lse, a
//    sum ruled by its first terms) count with the row's own norm where that is larger: weight,
//    logit and lse are scaled up to it. What is below 2^-126 may be 0: p, ds and their products
//    lose that much, all of them alike, so that adds up by size (Sensitivity::underflow) and on top
//    of the squares' root. Times the factor above this is an absolute bound. A group
//    is held to 5e-6 of its exact norm (kGradientBound, the contract for moderate logits) or to
//    that, whichever is more; which for normal inputs and 2048 keys is 2e-6 (D = 64) to 4e-6 (D =
//    256).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/reference/gradient.h"
#include "src/base/dtype.h"

namespace cpattn {

inline constexpr double kPathBound = 1e-6;
inline constexpr double kGradientBound = 5e-6;
inline constexpr double kUnitRoundoff = 0x1p-24;
inline constexpr double kOutputRoundingShare = 1.25;

/// What the bounds depend on, besides the inputs.
struct Arithmetic {
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t run_keys = 512;       ///< keys that one accumulator takes, at most
  std::int64_t run_rows = 512;       ///< rows, of all heads of a group, that one accumulator takes
  bool rounds_weights = false;       ///< before they meet the values
  DType weight_dtype = DType::bf16;  ///< to which they are rounded
  DType out_dtype = DType::f32;
};

/// One head of one chunk, as far as it was compared.
struct BoundedGroup {
  std::int64_t rows = 512;
  double logit_magnitude = 0.0;  ///< of the logits that carry weight
  double logit_size = 0.0;       ///< 2-norm over rows of these logits and of their parts
  double term_size = 0.0;        ///< 2-norm over rows of the terms of out
};

/// Relative bound of out in a group.
double out_bound(const Arithmetic& arithmetic, const BoundedGroup& group);

/// Relative bound of lse (against max(|lse|, 1)).
double lse_bound(const Arithmetic& arithmetic, const BoundedGroup& group);

/// Absolute bounds of the same groups: where terms cancel these are the larger ones.
double out_cancellation(const Arithmetic& arithmetic, const BoundedGroup& group);
double lse_cancellation(const Arithmetic& arithmetic, const BoundedGroup& group);

/// What a row of a gradient is summed over.
enum class SummedOver { keys, rows };

/// Root mean square of the 2-norm of the rounding error of one gradient row with this norm.
double gradient_error(const Arithmetic& arithmetic, SummedOver summed_over,
                      const reference::Sensitivity& sensitivity, double norm);

/// Absolute bound of a group of `rows` gradient rows; `squares` is the sum of their squared
/// gradient_error().
double gradient_bound(std::int64_t rows, double squares);

/// The absolute bounds of all groups, [num_chunks, heads]. `chunk_of_row` has an entry for each row
/// of the gradient; its values are [rows, heads, dim], its sensitivities [rows, heads].
std::vector<double> gradient_bounds(const Arithmetic& arithmetic, SummedOver summed_over,
                                    const reference::GradientRows& gradient,
                                    std::span<const std::int32_t> chunk_of_row,
                                    std::size_t num_chunks, std::size_t num_heads);

}  // namespace cpattn
