// How far a correct attention, in f32 or with weights rounded to 16 bits, may be from exact
// arithmetic, derived; and the check of a whole result against the double-precision reference with
// that bound.
//
// Notation. u = 2^-24 is the unit roundoff of f32. One (row, head) sees n keys; its logits are
// s_j = c q.k_j with |s_j| <= L = |c| |q| max_j |k_j| (Cauchy, Schwarz); w_j are its exact weights.
//
// Logits. A sum of D products in any order has error <= D u sum_d |q_d k_jd| <= D u L / |c|
// (Higham 2002, eq. 3.5; products of 16-bit inputs are even exact). The constant c log2(e), the
// product with it and the difference to the running maximum (of size <= 2 L) round once each, and
// the differences of maxima that later rescale the partial sums add up to at most another 2 L:
//     delta = (D + 6) u L.
// Weights. exp2 has a relative error of at most e. A term passes at most n additions, and one
// rescaling (a factor 2^x and a product: e + 2 u) per key tile and per merge level:
//     rho = delta + e + n u + (tiles + levels) (e + 2 u) + p,
// with p the relative rounding of a weight before it meets v (2^-8 where P is rounded to bf16,
// 2^-11 to f16). Weights are at most 1, and f16 has a spacing of 2^-24 below 2^-14: there the n
// weights are off by at most s = 2^-25 each, on the scale on which the largest one is 1 and the
// denominator no less.
// Result. Numerator and denominator are each wrong by a factor within 1 +- rho, and
// sum_j w_j |v_j| <= V = max_j |v_j|, so with the final division
//     |out error| <= (2 rho + n s) / (1 - rho) V + u V,  |lse error| <= -ln(1 - rho) + 2 u |lse|,
// and out is rounded once more to its type. Since out is a mean of v, no bound needs to exceed 2 V.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/support/attention_case.h"

namespace cpattn::testing {

inline constexpr double kUnitRoundoff = 0x1p-24;

/// Relative error allowed to the kernels' 2^x: 4 units in the last place.
inline constexpr double kExp2Error = 4 * 0x1p-23;
/// The same where a weight is rounded to bf16 right after it: a hundredth of that rounding.
inline constexpr double kExp2ErrorBf16 = 0x1p-8 / 100;

struct ErrorModel {
  double weight_rounding = 0.0;      ///< p above, with what the coarser 2^x adds
  double lse_weight_rounding = 0.0;  ///< that of the weights in the denominator
  double weight_spacing = 0.0;       ///< s above
  double out_rounding = 0.0;         ///< relative, half the epsilon of the output type
  double out_spacing = 0.0;          ///< absolute, for denormals of the output type
};

/// The bf16 dot instruction adds up the rounded weights, tensor cores meet v with rounded weights
/// but add up the others.
inline ErrorModel error_model(const KernelTable& kernels, DType dtype, DType out_dtype) {
  const std::string_view numerics = kernels.numerics(dtype);
  ErrorModel model{.out_rounding = out_dtype == DType::f32 ? 0.0 : epsilon(out_dtype) / 2,
                   .out_spacing = out_dtype == DType::f16 ? 0x1p-25 : 0.0};
  if (numerics.starts_with("bf16-dot")) {
    model.weight_rounding = model.lse_weight_rounding = epsilon(DType::bf16) / 2 + kExp2ErrorBf16;
  } else if (numerics.starts_with("cuda-mma") || numerics.starts_with("cuda-wgmma")) {
    model.weight_rounding = epsilon(dtype) / 2;
    model.weight_spacing = dtype == DType::f16 ? 0x1p-25 : 0.0;
  }
  return model;
}

/// What the bound of one (row, head) depends on.
struct RowFacts {
  std::int64_t head_dim = 0;
  std::int64_t num_keys = 0;
  std::int64_t chunk_tokens = 1;
  double max_logit = 0.0;  ///< L
  double max_value = 0.0;  ///< V
};

struct Tolerance {
  double out = 0.0;  ///< before the rounding to the output type
  double lse = 0.0;  ///< without the part proportional to |lse|
};

inline Tolerance row_tolerance(const RowFacts& row, const ErrorModel& model) {
  constexpr std::int64_t kTile = 64;  // keys between two rescalings, at least
  const auto n = static_cast<double>(row.num_keys);
  const double tiles = static_cast<double>(std::min(row.num_keys, row.chunk_tokens) / kTile + 1);
  const double levels =
      std::ceil(std::log2(std::max(1.0, std::ceil(n / static_cast<double>(row.chunk_tokens))))) + 1;
  const double rho = (static_cast<double>(row.head_dim) + 6) * kUnitRoundoff * row.max_logit +
                     kExp2Error + n * kUnitRoundoff +
                     (tiles + levels) * (kExp2Error + 2 * kUnitRoundoff);
  const double lse_rho = rho + model.lse_weight_rounding, out_rho = rho + model.weight_rounding;
  const double lse = lse_rho >= 0.5 ? 2 * lse_rho : -std::log1p(-lse_rho);
  if (out_rho >= 0.5) return {2 * row.max_value, lse};
  const double relative = (2 * out_rho + n * model.weight_spacing) / (1 - out_rho);
  return {relative * row.max_value + kUnitRoundoff * row.max_value, lse};
}

/// The reference result of a problem and the bound of each of its rows, computed once and then
/// asked about any number of results.
class Oracle {
 public:
  explicit Oracle(const AttentionCase& problem)
      : problem_(problem), expected_(reference_of(problem)), key_norms_(norms(problem.k)) {
    const AttentionShape& shape = problem.shape;
    value_maxima_ = maxima(problem.v);
    query_norms_ = norms(problem.q);
    facts_.resize(static_cast<std::size_t>(problem.batch.q_rows * shape.num_heads));
    for (const Document& document : problem.batch.documents)
      for (std::int64_t h = 0; h < shape.num_heads; ++h) add_document(document, h);
  }

  const reference::AttentionResult& expected() const { return expected_; }

  /// Whether every out and lse is within the bound of the reference; rows without keys must be
  /// exactly +0 and -inf. NaN is never within a bound.
  ::testing::AssertionResult accepts(const Attended& actual, const ErrorModel& model) const {
    const std::int64_t heads = problem_.shape.num_heads;
    for (std::int64_t row = 0; row < problem_.batch.q_rows; ++row)
      for (std::int64_t h = 0; h < heads; ++h) {
        auto result = accepts_row(actual, model, row, h);
        if (!result) return result;
      }
    return ::testing::AssertionSuccess();
  }

 private:
  ::testing::AssertionResult accepts_row(const Attended& actual, const ErrorModel& model,
                                         std::int64_t row, std::int64_t head) const {
    const std::int64_t dim = problem_.shape.value_dim;
    const auto place = static_cast<std::size_t>(row * problem_.shape.num_heads + head);
    const RowFacts& facts = facts_[place];
    const Tolerance tolerance = row_tolerance(facts, model);
    const double want_lse = expected_.lse[place];
    const auto got_lse = static_cast<double>(actual.lse[place]);
    const double lse_bound = tolerance.lse + 2 * kUnitRoundoff * std::abs(want_lse);
    if (facts.num_keys == 0 ? got_lse != want_lse : !(std::abs(got_lse - want_lse) <= lse_bound))
      return ::testing::AssertionFailure()
             << "lse of row " << row << " head " << head << " is " << got_lse << " instead of "
             << want_lse << ", bound " << lse_bound << ", " << facts.num_keys << " keys";
    for (std::int64_t d = 0; d < dim; ++d) {
      const double want =
          expected_.out[place * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)];
      const auto got = static_cast<double>(actual.out.at(row, head, d));
      const double bound =
          tolerance.out + model.out_spacing + model.out_rounding * (std::abs(want) + tolerance.out);
      const bool is_right = facts.num_keys == 0 ? actual.out.bits_at(row, head, d) == 0
                                                : std::abs(got - want) <= bound;
      if (!is_right)
        return ::testing::AssertionFailure()
               << "out of row " << row << " head " << head << " channel " << d << " is " << got
               << " instead of " << want << ", bound " << bound << ", " << facts.num_keys
               << " keys";
    }
    return ::testing::AssertionSuccess();
  }

  void add_document(const Document& document, std::int64_t head) {
    const AttentionShape& shape = problem_.shape;
    const std::int64_t kv_head = head / shape.group_size();
    const std::int64_t offset = document.kv_tokens - document.q_tokens;
    double key_norm = 0.0, max_value = 0.0;  // over the keys seen so far: a growing prefix
    std::int64_t num_keys = 0;
    for (std::int64_t i = 0; i < document.q_tokens; ++i) {
      const std::int64_t visible =
          problem_.config.mask == MaskKind::full ? document.kv_tokens : i + 1 + offset;
      for (; num_keys < visible; ++num_keys) {
        const auto key =
            static_cast<std::size_t>((document.kv_begin + num_keys) * shape.num_kv_heads + kv_head);
        key_norm = std::max(key_norm, key_norms_[key]);
        max_value = std::max(max_value, value_maxima_[key]);
      }
      const auto place = static_cast<std::size_t>((document.q_begin + i) * shape.num_heads + head);
      facts_[place] = {.head_dim = shape.head_dim,
                       .num_keys = num_keys,
                       .chunk_tokens = problem_.config.chunk_tokens,
                       .max_logit = std::abs(shape.softmax_scale) * query_norms_[place] * key_norm,
                       .max_value = max_value};
    }
  }

  /// Applies `reduce(sum, x)` over the channels of every (token, head).
  template <class Reduce>
  static std::vector<double> reduce_channels(const HostTensor& tensor, Reduce&& reduce) {
    std::vector<double> result;
    for (std::int64_t t = 0; t < tensor.shape()[0]; ++t)
      for (std::int64_t h = 0; h < tensor.shape()[1]; ++h) {
        double value = 0.0;
        for (std::int64_t d = 0; d < tensor.shape()[2]; ++d)
          value = reduce(value, static_cast<double>(tensor.at(t, h, d)));
        result.push_back(value);
      }
    return result;
  }
  static std::vector<double> norms(const HostTensor& tensor) {
    return reduce_channels(tensor, [](double a, double x) { return std::hypot(a, x); });
  }
  static std::vector<double> maxima(const HostTensor& tensor) {
    return reduce_channels(tensor, [](double a, double x) { return std::max(a, std::abs(x)); });
  }

  const AttentionCase& problem_;  ///< must outlive this
  reference::AttentionResult expected_;
  std::vector<double> key_norms_, value_maxima_, query_norms_;
  std::vector<RowFacts> facts_;
};

inline ::testing::AssertionResult near_reference(const AttentionCase& problem,
                                                 const Attended& actual, const ErrorModel& model) {
  return Oracle(problem).accepts(actual, model);
}

/// Relative L2 distance of out (all rows of all documents) to the reference.
inline double relative_l2(const AttentionCase& problem, const Attended& actual,
                          const reference::AttentionResult& expected) {
  double difference = 0.0, norm = 0.0;
  const auto& shape = actual.out.shape();
  std::size_t i = 0;
  for (std::int64_t t = 0; t < shape[0]; ++t)
    for (std::int64_t h = 0; h < shape[1]; ++h)
      for (std::int64_t d = 0; d < problem.shape.value_dim; ++d, ++i) {
        const double error = static_cast<double>(actual.out.at(t, h, d)) - expected.out[i];
        difference += error * error;
        norm += expected.out[i] * expected.out[i];
      }
  return std::sqrt(difference / norm);
}

}  // namespace cpattn::testing
