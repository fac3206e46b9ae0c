// Random numbers for tests: a pure function of (seed, index), so no order of calls matters.
#pragma once

#include <cmath>
#include <cstdint>

namespace cpattn::testing {

/// 64 well-mixed bits (the finaliser of SplitMix64, Steele et al. 2014).
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15ull + index + 0x632be59bd9b4e019ull;
  for (int round = 0; round < 2; ++round) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return x;
}

/// Uniform in (0, 1), never an end point.
constexpr double random_uniform(std::uint64_t seed, std::uint64_t index) {
  return (static_cast<double>(random_bits(seed, index) >> 12) + 0.5) * 0x1p-52;
}

/// Uniform in [low, high].
constexpr std::int64_t random_integer(std::uint64_t seed, std::uint64_t index, std::int64_t low,
                                      std::int64_t high) {
  const auto span = static_cast<std::uint64_t>(high - low + 1);
  return low + static_cast<std::int64_t>(random_bits(seed, index) % span);
}

/// Standard normal (Box and Muller 1958).
inline float random_normal(std::uint64_t seed, std::uint64_t index) {
  constexpr double kTau = 6.28318530717958647692;
  const double radius = std::sqrt(-2.0 * std::log(random_uniform(seed, 2 * index)));
  return static_cast<float>(radius * std::cos(kTau * random_uniform(seed, 2 * index + 1)));
}

}  // namespace cpattn::testing
