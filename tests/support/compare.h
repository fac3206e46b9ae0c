// Bitwise comparison that names the first differing element, with both values and both bit
// patterns.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <ostream>
#include <vector>

#include "src/base/enum_names.h"
#include "tests/support/host_tensor.h"

namespace cpattn::testing {

namespace detail {
struct Hex {
  std::uint32_t bits;
  int digits;
};
inline std::ostream& operator<<(std::ostream& stream, const Hex& hex) {
  return stream << "0x" << std::hex << std::setfill('0') << std::setw(hex.digits) << hex.bits
                << std::dec;
}
}  // namespace detail

/// Whether both tensors have the same type, shape and bits (so NaN equals NaN, +0 differs from -0).
inline ::testing::AssertionResult bits_equal(const HostTensor& actual, const HostTensor& expected) {
  if (actual.dtype() != expected.dtype() || actual.shape() != expected.shape())
    return ::testing::AssertionFailure() << "types or shapes differ";
  const auto& shape = actual.shape();
  std::int64_t differing = 0, elements = 0;
  auto result = ::testing::AssertionFailure();
  for (std::int64_t t = 0; t < shape[0]; ++t)
    for (std::int64_t h = 0; h < shape[1]; ++h)
      for (std::int64_t d = 0; d < shape[2]; ++d, ++elements) {
        const std::uint32_t a = actual.bits_at(t, h, d), b = expected.bits_at(t, h, d);
        if (a == b || ++differing > 1) continue;
        const int digits = 2 * static_cast<int>(size_of(actual.dtype()));
        result << "first difference at [token " << t << ", head " << h << ", channel " << d
               << "]: " << std::setprecision(9) << actual.at(t, h, d) << " ("
               << detail::Hex{a, digits} << ") instead of " << expected.at(t, h, d) << " ("
               << detail::Hex{b, digits} << ")";
      }
  if (differing == 0) return ::testing::AssertionSuccess();
  return result << "; " << differing << " of " << elements << " elements differ";
}

/// The same for lse [tokens, heads], row-major.
inline ::testing::AssertionResult bits_equal(const std::vector<float>& actual,
                                             const std::vector<float>& expected) {
  if (actual.size() != expected.size())
    return ::testing::AssertionFailure()
           << actual.size() << " elements instead of " << expected.size();
  std::size_t differing = 0;
  auto result = ::testing::AssertionFailure();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const auto a = std::bit_cast<std::uint32_t>(actual[i]);
    const auto b = std::bit_cast<std::uint32_t>(expected[i]);
    if (a == b || ++differing > 1) continue;
    result << "first difference at [" << i << "]: " << std::setprecision(9) << actual[i] << " ("
           << detail::Hex{a, 8} << ") instead of " << expected[i] << " (" << detail::Hex{b, 8}
           << ")";
  }
  if (differing == 0) return ::testing::AssertionSuccess();
  return result << "; " << differing << " of " << actual.size() << " elements differ";
}

}  // namespace cpattn::testing
