// The gradients of an attention problem in double, by the definition, and beside every element the
// most an f32 kernel may be off.
//
// u = 2^-24, b = 2^-8 where weights are rounded to bf16 (0 elsewhere), g(n) = n u / (1 - n u). With
// S = |softmax_scale|, all to first order in u:
//   weight  p errs relatively by r = S g(D + 4) sum_d |q k| (the score, its scaling, and what
//           stored scores of the same size did to lse) + 4 u (1 + |lse|) (lse stored in f32, in
//           units of log2, subtracted) + 4e-7 (two powers of two) + g(n) (the sum inside lse)
//           + b_lse (weights that forward rounded before it summed them)
//   out     errs by w = (2 (r + b) + n s) max|v| + (eps_out / 2) |out|
//   ds      errs by p (g(Dv + 2) (|dout|.|v| + |dout|.|out| + |dlse|) + |dout|.w) + |ds| (r + 3 u)
//   p, ds   are off by b of their size and s more when they are rounded before the last products
//   sums    of n terms t with errors e: sum(e) + g(n + 2) sum(|t| + e)
// With the bf16 dot instruction b = b_lse = 2^-8. On tensor cores b_lse = 0, b = 2^-8 (bf16) or
// 2^-11 (f16), u is 2^-23 in sums, which may be truncated, a power of two errs by 2^-22, and f16
// has a spacing of 2 s = 2^-24 below 2^-14 (s = 0 elsewhere). dout of another type is rounded to
// that of q: it errs by d = b, and so do dout.v, dout.out and dv's terms.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "kernels/mask.h"
#include "kernels/shape.h"
#include "src/base/dtype.h"
#include "tests/support/host_tensor.h"

namespace cpattn::testing {

/// q and dout are [rows, Hq, .], k and v [keys, Hkv, .]; row i sees mask.visible_keys(i, keys).
struct GradientInputs {
  AttentionShape shape;
  BlockMask mask;
  DType out_dtype = DType::f32;
  HostTensor q, k, v, dout;
  std::vector<float> dlse;  ///< [rows, Hq], or empty: zeros

  std::int64_t rows() const { return q.tokens(); }
  std::int64_t keys() const { return k.tokens(); }
  float dlse_at(std::int64_t row, std::int64_t head) const {
    return dlse.empty() ? 0.0f : dlse[static_cast<std::size_t>(row * shape.num_heads + head)];
  }
};

/// A tensor in double with the error allowed of every element.
class BoundedTensor {
 public:
  BoundedTensor(std::int64_t tokens, std::int64_t heads, std::int64_t dim, double unit)
      : shape_{tokens, heads, dim},
        unit_(unit),
        sums_(static_cast<std::size_t>(tokens * heads * dim)) {}

  /// A term of a sum, and by how much it may be off.
  void add(std::int64_t token, std::int64_t head, std::int64_t d, double term, double error) {
    Sum& sum = sums_[index(token, head, d)];
    sum.value += term;
    sum.size += std::abs(term) + error;
    sum.error += error;
    sum.terms += 1.0;
  }

  double value(std::int64_t token, std::int64_t head, std::int64_t d) const {
    return sums_[index(token, head, d)].value;
  }

  ::testing::AssertionResult accepts(const HostTensor& actual) const {
    for (std::int64_t t = 0; t < shape_[0]; ++t)
      for (std::int64_t h = 0; h < shape_[1]; ++h)
        for (std::int64_t d = 0; d < shape_[2]; ++d) {
          const Sum& sum = sums_[index(t, h, d)];
          const double n = (sum.terms + 2.0) * unit_, relative = n / (1.0 - n);
          // Below the smallest normal number (terms may underflow) sizes say nothing.
          const double allowed = sum.error + relative * sum.size +
                                 (sum.terms + 1.0) * std::numeric_limits<float>::min();
          const double error = std::abs(static_cast<double>(actual.at(t, h, d)) - sum.value);
          if (error <= allowed) continue;
          return ::testing::AssertionFailure()
                 << "[" << t << ", " << h << ", " << d << "]: " << actual.at(t, h, d)
                 << " instead of " << sum.value << ", off by " << error << ", allowed " << allowed;
        }
    return ::testing::AssertionSuccess();
  }

 private:
  struct Sum {
    double value = 0.0, size = 0.0, error = 0.0, terms = 0.0;
  };

  std::size_t index(std::int64_t token, std::int64_t head, std::int64_t d) const {
    return static_cast<std::size_t>((token * shape_[1] + head) * shape_[2] + d);
  }

  HostTensor::Shape shape_;
  double unit_;  ///< u
  std::vector<Sum> sums_;
};

struct BoundedGradients {
  BoundedTensor dq, dk, dv;
};

namespace detail {

/// What an arithmetic rounds, besides f32.
struct GradientRounding {
  double unit = 0x1p-24;     ///< u of sums
  double exp2 = 4e-7;        ///< two powers of two
  double weights = 0.0;      ///< b
  double lse_weights = 0.0;  ///< b of the weights whose sum is in lse
  double spacing = 0.0;      ///< s
  double dout = 0.0;         ///< d
};

inline GradientRounding gradient_rounding(const GradientInputs& in, std::string_view numerics) {
  GradientRounding rounding;
  const DType dtype = in.q.dtype();
  if (numerics.starts_with("bf16-dot")) {
    rounding.weights = rounding.lse_weights = epsilon(DType::bf16) / 2.0;
    if (in.dout.dtype() != DType::bf16) rounding.dout = rounding.weights;
  } else if (numerics.starts_with("cuda-mma") || numerics.starts_with("cuda-wgmma")) {
    rounding.unit = 0x1p-23;
    rounding.exp2 = 2 * 0x1p-22;
    rounding.weights = epsilon(dtype) / 2.0;
    rounding.spacing = dtype == DType::f16 ? 0x1p-25 : 0.0;
    if (in.dout.dtype() != dtype) rounding.dout = rounding.weights;
  }
  return rounding;
}

/// One row of one head, in double.
class GradientRow {
 public:
  GradientRow(const GradientInputs& in, const GradientRounding& rounding, std::int64_t row,
              std::int64_t head)
      : in_(in),
        rounding_(rounding),
        row_(row),
        head_(head),
        kv_head_(head / in.shape.group_size()) {
    seen_ = in.mask.visible_keys(row, in.keys());
    softmax();
  }

  void add_to(BoundedGradients& to) const {
    const AttentionShape& shape = in_.shape;
    for (std::int64_t j = 0; j < seen_; ++j) {
      const double p = weights_[static_cast<std::size_t>(j)], r = relative_error();
      const double b = rounding_.weights;
      double dp = 0.0, dp_size = 0.0;
      for (std::int64_t d = 0; d < shape.value_dim; ++d) {
        dp += static_cast<double>(dout(d)) * v(j, d);
        dp_size += std::abs(static_cast<double>(dout(d)) * v(j, d));
        to.dv.add(j, kv_head_, d, p * dout(d),
                  std::abs(dout(d)) * (p * (r + b + r * b + rounding_.dout) + rounding_.spacing));
      }
      const double ds = p * (dp - delta_);
      const double error =
          (1.0 + b) *
              (p * ((gamma(shape.value_dim + 2) + rounding_.dout) * (dp_size + delta_size_) +
                    delta_error_) +
               std::abs(ds) * (r + 3.0 * kU)) +
          std::abs(ds) * b + rounding_.spacing;
      const double scale = shape.softmax_scale;
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        const double key = in_.k.at(j, kv_head_, d), query = in_.q.at(row_, head_, d);
        to.dq.add(row_, head_, d, scale * ds * key, std::abs(scale * key) * error);
        to.dk.add(j, kv_head_, d, scale * ds * query, std::abs(scale * query) * error);
      }
    }
  }

 private:
  static constexpr double kU = 0x1p-24;
  double gamma(std::int64_t n) const {
    return rounding_.unit * static_cast<double>(n) / (1.0 - 1e-3);
  }

  float dout(std::int64_t d) const { return in_.dout.at(row_, head_, d); }
  float v(std::int64_t j, std::int64_t d) const { return in_.v.at(j, kv_head_, d); }

  void softmax() {
    const AttentionShape& shape = in_.shape;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (std::int64_t j = 0; j < seen_; ++j) {
      double score = 0.0, size = 0.0;
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        const double product =
            static_cast<double>(in_.q.at(row_, head_, d)) * in_.k.at(j, kv_head_, d);
        score += product;
        size += std::abs(product);
      }
      weights_.push_back(score * shape.softmax_scale);
      largest_score_ = std::max(largest_score_, size * std::abs(shape.softmax_scale));
      largest = std::max(largest, weights_.back());
    }
    for (double& weight : weights_) sum += weight = std::exp(weight - largest);
    lse_ = largest + std::log(sum);
    for (double& weight : weights_) weight /= sum;
    double largest_value = 0.0;
    for (std::int64_t j = 0; j < seen_; ++j)
      for (std::int64_t d = 0; d < shape.value_dim; ++d)
        largest_value = std::max(largest_value, std::abs(static_cast<double>(v(j, d))));
    for (std::int64_t d = 0; d < shape.value_dim; ++d) {
      double out = 0.0;
      for (std::int64_t j = 0; j < seen_; ++j)
        out += weights_[static_cast<std::size_t>(j)] * v(j, d);
      const double size = std::abs(static_cast<double>(dout(d)));
      delta_ += out * dout(d);
      delta_size_ += std::abs(out) * size;
      const double underflow = static_cast<double>(seen_) * rounding_.spacing;
      delta_error_ +=
          size * ((2.0 * (relative_error() + rounding_.weights) + underflow) * largest_value +
                  epsilon(in_.out_dtype) / 2.0 * std::abs(out));
    }
    delta_ -= in_.dlse_at(row_, head_);
    delta_size_ += std::abs(in_.dlse_at(row_, head_));
  }

  /// Of a weight. The largest score stands for every one: lse was made of all of them.
  double relative_error() const {
    return largest_score_ * gamma(in_.shape.head_dim + 4) + 4.0 * kU * (1.0 + std::abs(lse_)) +
           rounding_.exp2 + gamma(seen_) + rounding_.lse_weights;
  }

  const GradientInputs& in_;
  GradientRounding rounding_;
  std::int64_t row_, head_, kv_head_, seen_ = 0;
  std::vector<double> weights_;
  double lse_ = 0.0, largest_score_ = 0.0;
  double delta_ = 0.0, delta_size_ = 0.0, delta_error_ = 0.0;
};

}  // namespace detail

/// For the arithmetic that `numerics` names (KernelTable).
inline BoundedGradients bounded_gradients(const GradientInputs& in, std::string_view numerics) {
  const detail::GradientRounding rounding = detail::gradient_rounding(in, numerics);
  const AttentionShape& shape = in.shape;
  BoundedGradients result{
      BoundedTensor(in.rows(), shape.num_heads, shape.head_dim, rounding.unit),
      BoundedTensor(in.keys(), shape.num_kv_heads, shape.head_dim, rounding.unit),
      BoundedTensor(in.keys(), shape.num_kv_heads, shape.value_dim, rounding.unit)};
  for (std::int64_t row = 0; row < in.rows(); ++row)
    for (std::int64_t head = 0; head < shape.num_heads; ++head)
      detail::GradientRow(in, rounding, row, head).add_to(result);
  return result;
}

}  // namespace cpattn::testing
