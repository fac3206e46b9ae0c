// Integer helpers that never lose a bit silently.
#pragma once

#include <cstdint>
#include <type_traits>

#include "src/base/error.h"

namespace cpattn {

/// The value as To, or InvalidArgument when it does not fit (MPI counts, int32 kernel indices).
template <class To, class From>
constexpr To narrow(From value) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  const To result = static_cast<To>(value);
  require(static_cast<From>(result) == value && ((result < To{}) == (value < From{})), "value ",
          value, " does not fit into a ", 8 * sizeof(To), "-bit integer");
  return result;
}

/// ceil(a / b) for a >= 0, b > 0.
template <class T>
constexpr T ceil_div(T a, T b) {
  static_assert(std::is_integral_v<T>);
  return a / b + (a % b != 0 ? 1 : 0);
}

/// The smallest multiple of b that is >= a, for a >= 0, b > 0.
template <class T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace cpattn
