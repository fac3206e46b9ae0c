#include "cp/zigzag.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "src/base/error.h"

namespace cpattn::testing {
namespace {

/// Chunk c of a causal document does c + 1 units of work.
std::vector<std::int64_t> causal_work(std::int64_t num_chunks) {
  std::vector<std::int64_t> before{0};
  for (std::int64_t c = 0; c < num_chunks; ++c) before.push_back(before.back() + c + 1);
  return before;
}

std::int64_t peak_of(const std::vector<std::int64_t>& before, const std::vector<RunPair>& pairs) {
  std::int64_t front = 0, back = static_cast<std::int64_t>(before.size()) - 1, peak = 0;
  const auto at = [&](std::int64_t c) { return before[static_cast<std::size_t>(c)]; };
  for (const RunPair& pair : pairs) {
    peak = std::max(peak, at(front + pair.front) - at(front) + at(back) - at(back - pair.back));
    front += pair.front;
    back -= pair.back;
  }
  EXPECT_EQ(front, back) << "chunks left over";
  return peak;
}

/// The least peak over all cuts into runs of allowed lengths, by trying each.
std::int64_t least_peak(const std::vector<std::int64_t>& before, int parts) {
  const auto num_chunks = static_cast<std::int64_t>(before.size()) - 1;
  const std::int64_t even = num_chunks / (2 * parts);
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  std::vector<RunPair> pairs;
  const std::function<void(std::int64_t)> try_all = [&](std::int64_t left) {
    if (static_cast<int>(pairs.size()) == parts) {
      if (left == 0) least = std::min(least, peak_of(before, pairs));
      return;
    }
    for (std::int64_t a = std::max<std::int64_t>(0, even - 1); a <= even + 2; ++a)
      for (std::int64_t b = std::max<std::int64_t>(0, even - 1); b <= even + 2; ++b) {
        if (a + b > left) continue;
        pairs.push_back({a, b});
        try_all(left - a - b);
        pairs.pop_back();
      }
  };
  try_all(num_chunks);
  return least;
}

TEST(Zigzag, WhatTwicePDividesIsCutEvenly) {
  for (const int parts : {1, 2, 3, 8})
    for (const std::int64_t even : {0, 1, 5})
      for (const RunPair& pair : zigzag_pairs(causal_work(2 * parts * even), parts)) {
        EXPECT_EQ(pair.front, even);
        EXPECT_EQ(pair.back, even);
      }
}

TEST(Zigzag, NoCutHasALowerPeak) {
  for (int parts = 1; parts <= 4; ++parts)
    for (std::int64_t chunks = 1; chunks <= 21; ++chunks) {
      if (chunks % (2 * parts) == 0) continue;
      const auto work = causal_work(chunks);
      const auto pairs = zigzag_pairs(work, parts);
      ASSERT_EQ(pairs.size(), static_cast<std::size_t>(parts));
      EXPECT_EQ(peak_of(work, pairs), least_peak(work, parts)) << chunks << " " << parts;
    }
}

TEST(Zigzag, EqualWorkIsCutEvenly) {
  std::vector<std::int64_t> work;
  for (std::int64_t c = 0; c <= 11; ++c) work.push_back(c);
  for (const RunPair& pair : zigzag_pairs(work, 3)) {  // 11 chunks, 3 ranks: 4, 4 and 3
    EXPECT_GE(pair.front + pair.back, 3);
    EXPECT_LE(pair.front + pair.back, 4);
    EXPECT_GE(std::min(pair.front, pair.back), 1);
  }
}

TEST(Zigzag, NothingToCutWithIsRefused) {
  EXPECT_THROW(zigzag_pairs({}, 2), InvalidArgument);
  EXPECT_THROW(zigzag_pairs({0, 1}, 0), InvalidArgument);
}

}  // namespace
}  // namespace cpattn::testing
