// A seeded order, the same on every machine: for schedules that must not depend on theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cpattn {

/// A counter-based generator (splitmix64; Steele, Lea, Flood 2014): enough to shuffle.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class T>
void shuffle(std::vector<T>& items, std::uint64_t seed) {
  std::uint64_t state = mix(seed);
  for (std::size_t i = items.size(); i > 1; --i) {
    state = mix(state);
    std::swap(items[i - 1], items[state % i]);
  }
}

}  // namespace cpattn
