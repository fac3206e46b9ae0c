// What OrderedSum promises on any transport: the bits of one expression, whoever brings what.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "src/comm/ordered_sum.h"
#include "tests/src/comm_world.h"
#include "tests/support/random.h"

namespace cpattn {

using OrderedSumContract = CommTest;

/// Leaf `leaf` of a test: numbers of very different sizes, so that every order rounds differently.
template <class T>
std::vector<T> leaf_values(std::int64_t leaf, std::int64_t size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint64_t place = static_cast<std::uint64_t>(leaf) * 1000003 + i;
    const int exponent = static_cast<int>(cpattn::testing::random_integer(7, place, -12, 12));
    values[i] = std::ldexp(static_cast<T>(cpattn::testing::random_normal(8, place)), exponent);
  }
  return values;
}

/// The definition: leaves [first, last) of which `present` says who counts, halved at the largest
/// power of two. False when there is none.
template <class T>
bool tree_sum(std::int64_t first, std::int64_t last, const std::vector<bool>& present,
              std::int64_t size, std::vector<T>& sum) {
  if (last - first == 1) {
    if (!present[static_cast<std::size_t>(first)]) return false;
    sum = leaf_values<T>(first, size);
    return true;
  }
  const std::int64_t half =
      static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(last - first - 1)));
  std::vector<T> left, right;
  const bool has_left = tree_sum(first, first + half, present, size, left);
  const bool has_right = tree_sum(first + half, last, present, size, right);
  sum = has_left ? left : right;
  for (std::size_t i = 0; has_left && has_right && i < sum.size(); ++i) sum[i] += right[i];
  return has_left || has_right;
}

template <class T>
std::vector<T> expected_sum(const std::vector<bool>& present, std::int64_t size) {
  std::vector<T> sum;
  const auto num_leaves = static_cast<std::int64_t>(present.size());
  if (num_leaves == 0 || !tree_sum(0, num_leaves, present, size, sum))
    sum.assign(static_cast<std::size_t>(size), T{0});
  return sum;
}

/// owner[leaf] is the rank that brings it, -1 for nobody. Ranks bring theirs in an order that
/// `seed` shuffles (0: ascending).
template <class T>
std::vector<T> summed(OrderedSum<T>& sum, Communicator& comm, const std::vector<int>& owner,
                      std::uint64_t seed) {
  std::vector<std::int64_t> mine;
  for (std::size_t leaf = 0; leaf < owner.size(); ++leaf)
    if (owner[leaf] == comm.rank()) mine.push_back(static_cast<std::int64_t>(leaf));
  for (std::size_t i = mine.size(); seed != 0 && i > 1; --i)
    std::swap(mine[i - 1], mine[cpattn::testing::random_bits(seed, i) % i]);
  for (const std::int64_t leaf : mine) {
    const std::vector<T> values = leaf_values<T>(leaf, sum.size());
    sum.add(leaf, values);
  }
  std::vector<T> result(static_cast<std::size_t>(sum.size()), std::numeric_limits<T>::quiet_NaN());
  sum.all_reduce(comm, result, soon());
  return result;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](T x, T y) {
           using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
           return std::bit_cast<Bits>(x) == std::bit_cast<Bits>(y);
         });
}

inline std::vector<int> random_owners(std::uint64_t seed, std::int64_t num_leaves, int world_size,
                                      bool may_be_absent) {
  std::vector<int> owner;
  for (std::int64_t leaf = 0; leaf < num_leaves; ++leaf) {
    owner.push_back(static_cast<int>(cpattn::testing::random_integer(
        seed, static_cast<std::uint64_t>(leaf), may_be_absent ? -1 : 0, world_size - 1)));
  }
  return owner;
}

inline std::vector<bool> present_in(const std::vector<int>& owner) {
  std::vector<bool> present;
  for (const int rank : owner) present.push_back(rank >= 0);
  return present;
}

TEST_P(OrderedSumContract, HasTheBitsOfTheTreeForEveryDistribution) {
  run([&](Communicator& comm) {
    for (const std::int64_t num_leaves : {0, 1, 2, 3, 7, 8, 33, 100})
      for (std::uint64_t seed = 0; seed < 6; ++seed) {
        constexpr std::int64_t kSize = 5;
        const auto owner = random_owners(seed, num_leaves, comm.size(), seed % 2 == 1);
        OrderedSum<float> sum(num_leaves, kSize);
        EXPECT_TRUE(same_bits(summed(sum, comm, owner, seed),
                              expected_sum<float>(present_in(owner), kSize)))
            << num_leaves << " leaves, seed " << seed;
      }
  });
}

TEST_P(OrderedSumContract, HasTheBitsOfTheTreeForRunsOfNeighbours) {
  run([&](Communicator& comm) {
    constexpr std::int64_t kLeaves = 37, kSize = 3;
    const std::vector<bool> all(kLeaves, true);
    std::vector<int> contiguous, zigzag, last_only(kLeaves, comm.size() - 1);
    for (std::int64_t leaf = 0; leaf < kLeaves; ++leaf) {
      contiguous.push_back(static_cast<int>(leaf * comm.size() / kLeaves));
      const auto run = static_cast<int>(leaf * 2 * comm.size() / kLeaves);
      zigzag.push_back(std::min(run, 2 * comm.size() - 1 - run));
    }
    const auto expected = expected_sum<double>(all, kSize);
    for (const auto& owner : {contiguous, zigzag, last_only}) {
      OrderedSum<double> sum(kLeaves, kSize);
      EXPECT_TRUE(same_bits(summed(sum, comm, owner, 0), expected));
    }
  });
}

// Longer than one window, so that every slice border moves.
TEST_P(OrderedSumContract, CutsLongVectors) {
  run([&](Communicator& comm) {
    constexpr std::int64_t kLeaves = 3, kSize = (std::int64_t{1} << 17) + 12345;
    OrderedSum<float> sum(kLeaves, kSize);
    const auto owner = random_owners(3, kLeaves, comm.size(), false);
    EXPECT_TRUE(
        same_bits(summed(sum, comm, owner, 0), expected_sum<float>({true, true, true}, kSize)));
  });
}

TEST_P(OrderedSumContract, CanBeFilledAgain) {
  run([&](Communicator& comm) {
    constexpr std::int64_t kLeaves = 9, kSize = 4;
    OrderedSum<float> sum(kLeaves, kSize);
    for (std::uint64_t step = 1; step < 4; ++step) {
      const auto owner = random_owners(step, kLeaves, comm.size(), true);
      EXPECT_TRUE(
          same_bits(summed(sum, comm, owner, step), expected_sum<float>(present_in(owner), kSize)));
    }
  });
}

TEST_P(OrderedSumContract, HoldsFewVectorsOfANeighbouringRun) {
  constexpr std::int64_t kLeaves = 1000;
  OrderedSum<float> sum(kLeaves, 1);
  std::size_t most = 0;
  for (std::int64_t leaf = 0; leaf < kLeaves; ++leaf) {
    sum.add(leaf, leaf_values<float>(leaf, 1));
    most = std::max(most, sum.num_vectors());
  }
  EXPECT_LE(most, 11u);  // one a level, and the one that is being added
}

TEST_P(OrderedSumContract, WhatOneRankDoesWrongIsRefusedOnAll) {
  const auto told = [&](Communicator& comm, auto&& wrong) {
    const int culprit = comm.size() - 1;
    OrderedSum<float> sum(4, 2);
    if (comm.rank() == culprit) wrong(sum);
    std::vector<float> result(2);
    const std::string text =
        text_thrown_by<InvalidArgument>([&] { sum.all_reduce(comm, result, soon()); });
    EXPECT_NE(text.find("rank " + std::to_string(culprit)), std::string::npos) << text;
    sum.all_reduce(comm, result, soon());  // a refusal leaves it empty and usable
    EXPECT_EQ(result, (std::vector<float>{0.0f, 0.0f}));
    return text;
  };
  run([&](Communicator& comm) {
    const std::vector<float> two{1, 2}, three{1, 2, 3};
    EXPECT_NE(told(comm, [&](auto& sum) { sum.add(4, two); }).find("leaf 4"), std::string::npos);
    EXPECT_NE(told(comm, [&](auto& sum) { sum.add(-1, two); }).find("leaf -1"), std::string::npos);
    EXPECT_NE(told(comm, [&](auto& sum) { sum.add(1, three); }).find("3 numbers, expected 2"),
              std::string::npos);
    EXPECT_NE(told(comm, [&](auto& sum) { sum.refuse("no numbers"); }).find(": no numbers"),
              std::string::npos);
    EXPECT_NE(told(comm,
                   [&](auto& sum) {
                     for (const int leaf : {0, 1, 0}) sum.add(leaf, two);
                   })
                  .find("leaf 0 was brought twice"),
              std::string::npos);
  });
}

// What a rank refuses is all there is to say: it may not know the others' sizes.
TEST_P(OrderedSumContract, ARankThatCannotBeginRefusesForAll) {
  if (size() == 1) return;
  run([&](Communicator& comm) {
    const bool is_culprit = comm.rank() == 1;
    OrderedSum<float> sum(is_culprit ? 0 : 8, is_culprit ? 0 : 2);
    std::vector<float> result(is_culprit ? 0 : 2);
    if (is_culprit) sum.refuse("no numbers");
    EXPECT_EQ(text_thrown_by<InvalidArgument>([&] { sum.all_reduce(comm, result, soon()); }),
              "rank 1: no numbers");
  });
}

TEST_P(OrderedSumContract, ALeafOfTwoRanksIsRefused) {
  if (size() == 1) return;  // there is no second rank
  run([&](Communicator& comm) {
    OrderedSum<float> sum(8, 1);
    const std::vector<float> one{1};
    if (comm.rank() == 0) {
      for (const int leaf : {0, 1, 2, 3}) sum.add(leaf, one);
    }
    if (comm.rank() == 1) sum.add(2, one);
    std::vector<float> result(1);
    const std::string text =
        text_thrown_by<InvalidArgument>([&] { sum.all_reduce(comm, result, soon()); });
    EXPECT_EQ(text, "leaf 2 was brought twice, by rank 0 and by rank 1");
  });
}

TEST_P(OrderedSumContract, SizesThatDifferAreRefused) {
  if (size() == 1) return;
  run([&](Communicator& comm) {
    const std::int64_t more = comm.rank() == 1 ? 1 : 0;
    OrderedSum<float> sum(8 + more, 1 + more);
    std::vector<float> result(static_cast<std::size_t>(1 + more));
    const std::string text =
        text_thrown_by<InvalidArgument>([&] { sum.all_reduce(comm, result, soon()); });
    EXPECT_NE(text.find("num_leaves differs between ranks: rank 0 has 8, rank 1 has 9"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("size differs between ranks: rank 0 has 1, rank 1 has 2"),
              std::string::npos)
        << text;
  });
}

}  // namespace cpattn
