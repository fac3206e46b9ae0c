#include "src/base/reduction_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"
#include "tests/support/random.h"

namespace cpattn::testing {
namespace {

using Order = std::vector<std::int64_t>;

std::string pair_of(const std::string& left, const std::string& right) {
  return cpattn::detail::concat("(", left, " ", right, ")");
}

/// The tree as a text, "((0 1) 2)", whatever the order of arrival; and the most nodes that ever
/// waited.
struct Folded {
  std::string text;
  std::size_t most_pending = 0;
};

Folded fold(ReductionTree& tree, const Order& order) {
  std::vector<std::string> values;
  Folded result;
  for (const std::int64_t chunk : order) {
    EXPECT_FALSE(tree.is_complete());
    values.push_back(std::to_string(chunk));
    tree.add(chunk, static_cast<int>(values.size()) - 1, [&](int left, int right) {
      values.push_back(
          pair_of(values[static_cast<std::size_t>(left)], values[static_cast<std::size_t>(right)]));
      return static_cast<int>(values.size()) - 1;
    });
    result.most_pending = std::max(result.most_pending, tree.pending().size());
  }
  EXPECT_TRUE(tree.is_complete());
  if (tree.is_complete()) result.text = values[static_cast<std::size_t>(tree.root())];
  return result;
}

Folded fold(std::int64_t num_chunks, const Order& order) {
  ReductionTree tree(num_chunks);
  return fold(tree, order);
}

Order ascending(std::int64_t num_chunks, std::int64_t start = 0) {
  Order order;
  for (std::int64_t i = 0; i < num_chunks; ++i) order.push_back((start + i) % num_chunks);
  return order;
}

TEST(ReductionTree, ShapesByHand) {
  EXPECT_EQ(fold(1, {0}).text, "0");
  EXPECT_EQ(fold(2, {0, 1}).text, "(0 1)");
  EXPECT_EQ(fold(3, {0, 1, 2}).text, "((0 1) 2)");
  EXPECT_EQ(fold(5, ascending(5)).text, "(((0 1) (2 3)) 4)");
  EXPECT_EQ(fold(6, ascending(6)).text, "(((0 1) (2 3)) (4 5))");
  EXPECT_EQ(fold(7, ascending(7)).text, "(((0 1) (2 3)) ((4 5) 6))");
}

TEST(ReductionTree, TheOrderOfArrivalDoesNotShow) {
  for (std::int64_t n = 1; n <= 40; ++n) {
    const std::string expected = fold(n, ascending(n)).text;
    Order order = ascending(n);
    std::reverse(order.begin(), order.end());
    EXPECT_EQ(fold(n, order).text, expected);
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      for (std::size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[random_bits(seed, i) % i]);
      EXPECT_EQ(fold(n, order).text, expected) << n;
    }
  }
}

/// The text of the canonical tree over chunks [begin, end) below node (level, ...), from its
/// definition.
std::string defined(std::int64_t begin, std::int64_t width, std::int64_t num_chunks) {
  if (width == 1) return std::to_string(begin);
  const std::int64_t middle = begin + width / 2;
  if (middle >= num_chunks) return defined(begin, width / 2, num_chunks);
  return pair_of(defined(begin, width / 2, num_chunks), defined(middle, width / 2, num_chunks));
}

TEST(ReductionTree, IsTheTreeOfItsDefinition) {
  for (std::int64_t n = 1; n <= 130; ++n)
    EXPECT_EQ(fold(n, ascending(n)).text, defined(0, 256, n)) << n;
}

TEST(ReductionTree, IsPrefixStable) {
  // A row that sees only the first k of n chunks merges with empty states beyond: dropping those
  // from the tree of n must leave the tree of k.
  for (std::int64_t n = 1; n <= 33; ++n)
    for (std::int64_t k = 1; k <= n; ++k) {
      ReductionTree tree(n);
      std::vector<std::string> values;
      for (std::int64_t chunk = 0; chunk < n; ++chunk) {
        values.push_back(chunk < k ? std::to_string(chunk) : "");
        tree.add(chunk, static_cast<int>(values.size()) - 1, [&](int left, int right) {
          const std::string a = values[static_cast<std::size_t>(left)];
          const std::string b = values[static_cast<std::size_t>(right)];
          values.push_back(a.empty() ? b : b.empty() ? a : pair_of(a, b));
          return static_cast<int>(values.size()) - 1;
        });
      }
      EXPECT_EQ(values[static_cast<std::size_t>(tree.root())], fold(k, ascending(k)).text);
    }
}

/// The same for the present leaves [first, end): an absent child leaves its place to its sibling.
std::string defined_in(std::int64_t begin, std::int64_t width, std::int64_t first,
                       std::int64_t end) {
  if (begin >= end || begin + width <= first) return "";
  if (width == 1) return std::to_string(begin);
  const std::string left = defined_in(begin, width / 2, first, end);
  const std::string right = defined_in(begin + width / 2, width / 2, first, end);
  return left.empty() ? right : right.empty() ? left : pair_of(left, right);
}

TEST(ReductionTree, ARangeIsTheTreeWithoutTheAbsentLeaves) {
  for (std::int64_t first = 0; first <= 33; ++first)
    for (std::int64_t end = first + 1; end <= 34; ++end) {
      Order order = ascending(end - first);
      for (std::int64_t& leaf : order) leaf += first;
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        ReductionTree tree(first, end);
        EXPECT_EQ(fold(tree, order).text, defined_in(0, 64, first, end)) << first << ", " << end;
        for (std::size_t i = order.size(); i > 1; --i)
          std::swap(order[i - 1], order[random_bits(seed, i) % i]);
      }
    }
}

TEST(ReductionTree, WholeNodesStandForTheirLeaves) {
  // Leaves are dealt to `parts` in runs; each part folds its own, and what is left pending there
  // enters the whole tree as nodes.
  for (const std::int64_t first : {0, 3, 8})
    for (const std::int64_t end : {9, 16, 29})
      for (std::int64_t run = 1; run <= 6; ++run)
        for (const std::int64_t parts : {1, 2, 3}) {
          std::vector<std::string> values;
          const auto merge = [&](int left, int right) {
            values.push_back(pair_of(values[static_cast<std::size_t>(left)],
                                     values[static_cast<std::size_t>(right)]));
            return static_cast<int>(values.size()) - 1;
          };
          ReductionTree whole(first, end);
          for (std::int64_t part = 0; part < parts; ++part) {
            ReductionTree mine(first, end);
            for (std::int64_t leaf = first; leaf < end; ++leaf) {
              if (leaf / run % parts != part) continue;
              values.push_back(std::to_string(leaf));
              mine.add(leaf, static_cast<int>(values.size()) - 1, merge);
            }
            for (const auto& [node, id] : mine.pending()) whole.add(node, id, merge);
          }
          ASSERT_TRUE(whole.is_complete());
          EXPECT_EQ(values[static_cast<std::size_t>(whole.root())], defined_in(0, 32, first, end));
        }
}

TEST(ReductionTree, AscendingLeavesWaitAsAStack) {
  // What a loop over ascending leaves relies on: a leaf is only ever combined with the last of
  // those that wait, on its left.
  for (std::int64_t stride = 1; stride <= 5; ++stride) {
    ReductionTree tree(2, 61);
    std::vector<int> stack;
    int next = 0;
    for (std::int64_t leaf = 2; leaf < 61; leaf += stride) {
      stack.push_back(next++);
      tree.add(leaf, stack.back(), [&](int left, int right) {
        EXPECT_EQ(right, stack.back());
        stack.pop_back();
        EXPECT_EQ(left, stack.back());
        return left;
      });
    }
    EXPECT_EQ(tree.pending().size(), stack.size());
  }
}

TEST(ReductionTree, ARingLeavesFewPending) {
  for (std::int64_t n = 2; n <= 129; ++n)
    for (std::int64_t start = 0; start < n; ++start) {
      const double bound = std::max(2.0, 2 * std::log2(static_cast<double>(n)));
      EXPECT_LE(static_cast<double>(fold(n, ascending(n, start)).most_pending), bound) << n;
    }
}

TEST(ReductionTree, WrongArrivalsAreOurBug) {
  const auto merge = [](int, int) { return 9; };
  ReductionTree tree(4);
  tree.add(2, 0, merge);
  EXPECT_THROW(tree.add(2, 1, merge), InternalError);
  EXPECT_THROW(tree.add(4, 1, merge), InternalError);
  EXPECT_THROW(tree.add(-1, 1, merge), InternalError);
  ReductionTree range(2, 4);
  EXPECT_THROW(range.add(1, 0, merge), InternalError);
  EXPECT_THROW(range.add(TreeNode{1, 2}, 0, merge), InternalError);
}

TEST(ReductionTree, NoChunksNoRoot) {
  const ReductionTree tree(0);
  EXPECT_FALSE(tree.is_complete());
  EXPECT_EQ(tree.root(), -1);
}

}  // namespace
}  // namespace cpattn::testing
