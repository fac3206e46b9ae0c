#include "launch/error_bound.h"

#include <algorithm>
#include <cmath>

namespace cpattn {
namespace {

constexpr double kTileKeys = 128.0;
constexpr double kFewDraws = 2.0;  ///< times the root mean square

double path_bound(const Arithmetic& arithmetic) {
  const double keys = static_cast<double>(arithmetic.run_keys);
  const double rms = kUnitRoundoff * std::sqrt((kTileKeys + keys / kTileKeys) / 2.0);
  return std::max(kPathBound, kFewDraws * rms);
}

}  // namespace

double out_bound(const Arithmetic& arithmetic, double logit_magnitude) {
  const double growth = std::sqrt(2.0 * static_cast<double>(arithmetic.head_dim)) / 3.0;
  const double logits = kFewDraws * growth * kUnitRoundoff * logit_magnitude;
  return std::max(path_bound(arithmetic), logits) +
         (arithmetic.rounds_weights ? kWeightRounding : 0.0);
}

double lse_bound(const Arithmetic& arithmetic) {
  return path_bound(arithmetic) + (arithmetic.rounds_weights ? kWeightRounding : 0.0);
}

}  // namespace cpattn
