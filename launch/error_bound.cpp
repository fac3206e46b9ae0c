#include "launch/error_bound.h"

#include <algorithm>
#include <cmath>

namespace cpattn {
namespace {

constexpr double kTileKeys = 128.0;
constexpr double kTileRows = 48.0;
/// Of a weight with all that is done to it, in units of u.
constexpr double kWeightError = 3.6;
constexpr double kLeastFactor = 2.0;
/// Smaller numbers may be 0.
constexpr double kSmallest = 0x1p-126;
constexpr double kDeviations = 4.0;

/// What the root mean square is multiplied by: few rows are few draws.
double factor(std::int64_t rows) {
  if (rows == 0) return kLeastFactor;
  const double deviation = 1.0 / std::sqrt(2.0 * static_cast<double>(rows));
  return std::max(kLeastFactor, 1.0 + kDeviations * deviation);
}

/// Of a sum of so many terms in tiles, in units of u squared.
double path_variance(std::int64_t terms, double tile) {
  return (tile + static_cast<double>(terms) / tile) / 2.0;
}

double path_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  const double rms = kUnitRoundoff * std::sqrt(path_variance(arithmetic.run_keys, kTileKeys));
  return std::max(kPathBound, factor(group.rows) * rms);
}

/// Of a logit, in units of u squared times its size and that of its parts.
double logit_variance(const Arithmetic& arithmetic) {
  return static_cast<double>(arithmetic.head_dim) / 6.0 + 1.0;
}

double weight_rounding(const Arithmetic& arithmetic) {
  if (!arithmetic.rounds_weights) return 0.0;
  return epsilon(arithmetic.weight_dtype) / 2.0;
}

}  // namespace

double out_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  const double growth = std::sqrt(2.0 * static_cast<double>(arithmetic.head_dim)) / 3.0;
  const double logits = factor(group.rows) * growth * kUnitRoundoff * group.logit_magnitude;
  return std::max(path_bound(arithmetic, group), logits) + weight_rounding(arithmetic);
}

double lse_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  return path_bound(arithmetic, group) + weight_rounding(arithmetic);
}

double out_cancellation(const Arithmetic& arithmetic, const BoundedGroup& group) {
  return out_bound(arithmetic, group) * group.term_size;
}

double lse_cancellation(const Arithmetic& arithmetic, const BoundedGroup& group) {
  return factor(group.rows) * kUnitRoundoff * std::sqrt(logit_variance(arithmetic)) *
         group.logit_size;
}

double gradient_error(const Arithmetic& arithmetic, SummedOver summed_over,
                      const reference::Sensitivity& sensitivity, double norm) {
  const auto square = [](double x) { return x * x; };
  const double unit = square(kUnitRoundoff);
  const double value_walk = static_cast<double>(arithmetic.value_dim) / 6.0;
  const double keys_path = path_variance(arithmetic.run_keys, kTileKeys);
  const double path =
      summed_over == SummedOver::keys ? keys_path : path_variance(arithmetic.run_rows, kTileRows);
  const double rounding_variance = square(weight_rounding(arithmetic)) / 3.0;
  const double out_variance =
      arithmetic.out_dtype == DType::f32 ? 0.0 : square(epsilon(arithmetic.out_dtype) / 2.0) / 3.0;

  const double weight = unit * (square(kWeightError) + path) + 2.0 * rounding_variance;
  const double logit = unit * logit_variance(arithmetic);
  const double lse = unit;
  const double product = unit * value_walk;
  const double delta = unit * (value_walk + keys_path) + out_variance + rounding_variance;
  // Where the terms of a row agree in direction, what they have in common adds up with them.
  const double common = sensitivity.weight > 0.0 ? std::max(1.0, norm / sensitivity.weight) : 1.0;
  return std::sqrt(weight * square(common * sensitivity.weight) +
                   logit * square(common * sensitivity.logit) +
                   lse * square(common * sensitivity.lse) + product * square(sensitivity.product) +
                   delta * square(sensitivity.delta)) +
         kSmallest * sensitivity.underflow;
}

double gradient_bound(std::int64_t rows, double squares) {
  return factor(rows) * std::sqrt(squares);
}

std::vector<double> gradient_bounds(const Arithmetic& arithmetic, SummedOver summed_over,
                                    const reference::GradientRows& gradient,
                                    std::span<const std::int32_t> chunk_of_row,
                                    std::size_t num_chunks, std::size_t num_heads) {
  std::vector<double> squares(num_chunks * num_heads);
  std::vector<std::int64_t> rows(squares.size());
  const std::size_t places = gradient.sensitivities.size();
  const std::size_t dim = places == 0 ? 0 : gradient.values.size() / places;
  for (std::size_t place = 0; place < places; ++place) {
    const double* values = &gradient.values[place * dim];
    const double norm = std::sqrt(reference::dot(values, values, dim));
    const double error =
        gradient_error(arithmetic, summed_over, gradient.sensitivities[place], norm);
    const auto chunk = static_cast<std::size_t>(chunk_of_row[place / num_heads]);
    const std::size_t group = chunk * num_heads + place % num_heads;
    squares[group] += error * error;
    ++rows[group];
  }
  std::vector<double> bounds;
  for (std::size_t i = 0; i < squares.size(); ++i) {
    bounds.push_back(gradient_bound(rows[i], squares[i]));
  }
  return bounds;
}

}  // namespace cpattn
