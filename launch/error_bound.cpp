#include "launch/error_bound.h"

#include <algorithm>
#include <cmath>

namespace cpattn {

double out_bound(std::int64_t head_dim, double logit_magnitude, bool rounds_weights) {
  const double growth = std::sqrt(2.0 * static_cast<double>(head_dim)) / 3.0;
  const double path = std::max(kPathBound, growth * kUnitRoundoff * logit_magnitude);
  return path + (rounds_weights ? kWeightRounding : 0.0);
}

double lse_bound(bool rounds_weights) {
  return kPathBound + (rounds_weights ? kWeightRounding : 0.0);
}

}  // namespace cpattn
