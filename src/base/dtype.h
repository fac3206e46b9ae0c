// Element types of the tensors a caller hands us, and exact conversions between them and f32.
//
// Rounding to bf16 and f16 is to nearest, ties to even; NaN stays NaN, overflow becomes infinity,
// f16 denormals are kept.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "src/base/enum_names.h"

namespace cpattn {

enum class DType { f32, f16, bf16 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// Distance from 1 to the next representable value.
constexpr double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x1p-23;
    case DType::f16:
      return 0x1p-10;
    case DType::bf16:
      return 0x1p-7;
  }
  return 0.0;
}

template <>
struct EnumNames<DType> {
  static constexpr std::array kValues{NamedValue<DType>{DType::f32, "f32"},
                                      NamedValue<DType>{DType::f16, "f16"},
                                      NamedValue<DType>{DType::bf16, "bf16"}};
};

/// Storage of a bf16 / f16 number: the bit pattern, nothing else.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

constexpr float to_float(float value) { return value; }

constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

constexpr float to_float(f16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {  // zero or denormal: fraction * 2^-24, exact in f32
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

constexpr bf16 to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN: keep it quiet, never round it to infinity
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr f16 to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the last kept bit with 2^-24, so the addition itself rounds to
    // even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

/// Element `index` of an array of the given type, as f32 (exact for all three types).
inline float load_as_float(const void* elements, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(elements)[index];
    case DType::f16:
      return to_float(static_cast<const f16*>(elements)[index]);
    case DType::bf16:
      return to_float(static_cast<const bf16*>(elements)[index]);
  }
  return 0.0f;
}

/// Rounds `value` once into element `index` of an array of the given type.
inline void store_from_float(void* elements, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(elements)[index] = value;
      return;
    case DType::f16:
      static_cast<f16*>(elements)[index] = to_f16(value);
      return;
    case DType::bf16:
      static_cast<bf16*>(elements)[index] = to_bf16(value);
      return;
  }
}

}  // namespace cpattn
