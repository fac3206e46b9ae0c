#include "kernels/lse.h"

#include <cmath>  // std::log

namespace cpattn {

float finalize_lse(float m, float l) {
  if (m == kEmptyMax && l == 0.0f) return kEmptyMax;
  return static_cast<float>(static_cast<double>(m) * kLn2 + std::log(static_cast<double>(l)));
}

}  // namespace cpattn
