#include "launch/error_bound.h"

#include <algorithm>
#include <cmath>

namespace cpattn {
namespace {

double path_bound(const Arithmetic& arithmetic) {
  const double runs = static_cast<double>(arithmetic.run_keys) / static_cast<double>(kPathRun);
  return kPathBound * std::max(1.0, std::sqrt(runs));
}

}  // namespace

double out_bound(const Arithmetic& arithmetic, double logit_magnitude) {
  const double growth = std::sqrt(2.0 * static_cast<double>(arithmetic.head_dim)) / 3.0;
  const double path = std::max(path_bound(arithmetic), growth * kUnitRoundoff * logit_magnitude);
  return path + (arithmetic.rounds_weights ? kWeightRounding : 0.0);
}

double lse_bound(const Arithmetic& arithmetic) {
  return path_bound(arithmetic) + (arithmetic.rounds_weights ? kWeightRounding : 0.0);
}

}  // namespace cpattn
