// f32 arithmetic of device code that has the bits of the CPU kernels: the same operations in the
// same order (kernels/cpu/simd-inl.h), fused only where written. docs/numerics.md says which bits
// depend on it.
#pragma once

#include "kernels/cuda/ptx.h"
#include "kernels/lse.h"
#include "src/base/dtype.h"

namespace cpattn::cuda {

/// a > b ? a : b: a NaN in b comes through, a NaN in a does not.
CP_DEVICE float larger(float a, float b) { return a > b ? a : b; }

/// a < b ? a : b, likewise.
CP_DEVICE float smaller(float a, float b) { return a < b ? a : b; }

/// A NaN wins and stays.
CP_DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

/// 2^x for x <= ~0.5, relative error below 2e-7; exactly 1 at 0, exactly 0 for x <= -126.5, NaN for
/// NaN. Adding 1.5 * 2^23 + 127 leaves n + 127, n = round(x), in the low bits of the sum, and a
/// shift makes them the exponent of 2^n; a polynomial does the rest of x.
CP_DEVICE float exp2_nonpositive(float x) {
  constexpr float kMagic = 12582912.0f + 127.0f;
  x = larger(-127.0f, x);
  const float shifted = x + kMagic;
  const float f = x - (shifted - kMagic);
  float p = 0x1.5bb9fap-10f;
  p = fmaf(p, f, 0x1.3cea86p-7f);
  p = fmaf(p, f, 0x1.c6b754p-5f);
  p = fmaf(p, f, 0x1.ebf9bcp-3f);
  p = fmaf(p, f, 0x1.62e42ap-1f);
  p = fmaf(p, f, 1.0f);
  return p * __uint_as_float(__float_as_uint(shifted) << 23);
}

/// o / l, given inverse = 1 / l: the product corrected once by its exact remainder is the rounded
/// quotient; where the remainder is no number, the product stays.
CP_DEVICE float divide(float o, float l, float inverse) {
  const float quotient = o * inverse;
  const float remainder = fmaf(-quotient, l, o);
  return remainder == remainder ? fmaf(remainder, inverse, quotient) : quotient;
}

/// m * ln(2) + ln(l) in double, rounded once; -inf for an empty state.
CP_DEVICE float natural_lse(float m, float l) {
  if (m == -INFINITY && l == 0.0f) return -INFINITY;
  return static_cast<float>(static_cast<double>(m) * kLn2 + log(static_cast<double>(l)));
}

/// Element `index` of an array of that type.
CP_DEVICE float load_element(const void* elements, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(elements)[index];
    case DType::f16:
      return ptx::widen(static_cast<const f16*>(elements)[index]);
    case DType::bf16:
      return ptx::widen(static_cast<const bf16*>(elements)[index]);
  }
  return 0.0f;
}

/// Rounded once, to nearest even.
CP_DEVICE void store_element(void* elements, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(elements)[index] = value;
      return;
    case DType::f16:
      static_cast<f16*>(elements)[index] = {
          static_cast<std::uint16_t>(ptx::pack(value, 0.0f, f16{}))};
      return;
    case DType::bf16:
      static_cast<bf16*>(elements)[index] = {
          static_cast<std::uint16_t>(ptx::pack(value, 0.0f, bf16{}))};
      return;
  }
}

}  // namespace cpattn::cuda
