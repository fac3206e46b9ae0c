#include "src/base/overlap.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <vector>

#include "tests/support/random.h"

namespace cpattn::testing {
namespace {

/// Every byte of a view; the second value says that one was met twice.
std::pair<std::set<std::int64_t>, bool> bytes_of(const RowSet& rows) {
  std::set<std::int64_t> bytes;
  bool is_twice = false;
  for (std::int64_t i = 0; i < rows.counts[0]; ++i)
    for (std::int64_t j = 0; j < rows.counts[1]; ++j)
      for (std::int64_t k = 0; k < rows.row_bytes; ++k)
        is_twice |=
            !bytes.insert(rows.address + i * rows.strides[0] + j * rows.strides[1] + k).second;
  return {bytes, is_twice};
}

bool share(const std::set<std::int64_t>& a, const std::set<std::int64_t>& b) {
  for (const std::int64_t byte : a)
    if (b.count(byte) > 0) return true;
  return false;
}

TEST(Overlap, AgreesWithEveryByte) {
  constexpr std::uint64_t kSeed = 20261130;
  std::uint64_t index = 0;
  const auto number = [&](std::int64_t least, std::int64_t most) {
    return random_integer(kSeed, index++, least, most);
  };
  int overlapping = 0, apart = 0, folded = 0;
  for (int i = 0; i < 20000; ++i) {
    RowSet a{number(0, 60),
             {number(0, 4), number(0, 4)},
             {number(-20, 20), number(-20, 20)},
             number(0, 6)};
    RowSet b{number(0, 60),
             {number(0, 4), number(0, 4)},
             {number(-20, 20), number(-20, 20)},
             number(0, 6)};
    if (i % 2 == 0) b.strides = a.strides;
    if (i % 4 == 2) b.strides[1] = number(-20, 20);
    const auto [bytes_a, is_folded] = bytes_of(a);
    const bool expected = share(bytes_a, bytes_of(b).first);
    ASSERT_EQ(overlap(a, b), expected) << "case " << i;
    ASSERT_EQ(overlap(b, a), expected) << "case " << i;
    ASSERT_EQ(overlaps_itself(a), is_folded) << "case " << i;
    ++(expected ? overlapping : apart);
    folded += is_folded ? 1 : 0;
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(apart, 1000);
  EXPECT_GT(folded, 1000);
}

TEST(Overlap, ViewsOfAFusedBufferInterleave) {
  constexpr std::int64_t kTokens = 100000, kHeads = 8, kDim = 4;
  std::vector<float> buffer(static_cast<std::size_t>(kTokens * 3 * kHeads * kDim));
  const auto view = [&](std::int64_t part, std::int64_t shift) {
    return rows_of(AnyConstTensor{buffer.data() + part * kHeads * kDim + shift,
                                  DType::f32,
                                  {kTokens - 1, kHeads, kDim},
                                  {3 * kHeads * kDim, kDim, 1}});
  };
  for (const std::int64_t part : {0, 1})
    for (const std::int64_t other : {1, 2}) {
      EXPECT_EQ(overlap(view(part, 0), view(other, 0)), part == other);
      EXPECT_TRUE(overlap(view(part, 1), view(other, 0)) || part + 1 != other);
    }
  EXPECT_FALSE(overlaps_itself(view(1, 0)));
}

TEST(Overlap, NothingOverlapsNothing) {
  const RowSet some{100, {2, 2}, {8, 4}, 4};
  EXPECT_FALSE(overlap(some, rows_of(TensorView<float, 2>{})));
  EXPECT_FALSE(overlap(some, rows_of(AnyConstTensor{})));
  EXPECT_TRUE(overlap(some, some));
}

}  // namespace
}  // namespace cpattn::testing
