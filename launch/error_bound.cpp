#include "launch/error_bound.h"

#include <algorithm>
#include <cmath>

namespace cpattn {
namespace {

constexpr double kTileKeys = 128.0;
constexpr double kLeastFactor = 2.0;
constexpr double kDeviations = 4.0;

/// What the root mean square is multiplied by: few rows are few draws.
double factor(const BoundedGroup& group) {
  if (group.rows == 0) return kLeastFactor;
  const double deviation = 1.0 / std::sqrt(2.0 * static_cast<double>(group.rows));
  return std::max(kLeastFactor, 1.0 + kDeviations * deviation);
}

double path_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  const double keys = static_cast<double>(arithmetic.run_keys);
  const double rms = kUnitRoundoff * std::sqrt((kTileKeys + keys / kTileKeys) / 2.0);
  return std::max(kPathBound, factor(group) * rms);
}

double weight_rounding(const Arithmetic& arithmetic) {
  return arithmetic.rounds_weights ? kWeightRounding : 0.0;
}

}  // namespace

double out_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  const double growth = std::sqrt(2.0 * static_cast<double>(arithmetic.head_dim)) / 3.0;
  const double logits = factor(group) * growth * kUnitRoundoff * group.logit_magnitude;
  return std::max(path_bound(arithmetic, group), logits) + weight_rounding(arithmetic);
}

double lse_bound(const Arithmetic& arithmetic, const BoundedGroup& group) {
  return path_bound(arithmetic, group) + weight_rounding(arithmetic);
}

}  // namespace cpattn
