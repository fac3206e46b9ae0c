// 16-bit floating-point numbers as the device converts them.
#pragma once

#include "src/base/dtype.h"

namespace cpattn::cuda_host {

/// Rounded to nearest even, like src/base/dtype.h; a NaN becomes the device's one NaN.
inline std::uint16_t rounded_bits(float value, bf16) {
  return value == value ? to_bf16(value).bits : std::uint16_t{0x7fff};
}
inline std::uint16_t rounded_bits(float value, f16) {
  return value == value ? to_f16(value).bits : std::uint16_t{0x7fff};
}

}  // namespace cpattn::cuda_host
