#include "src/base/integers.h"

#include <gtest/gtest.h>

#include <limits>

namespace cpattn {
namespace {

TEST(Integers, NarrowKeepsWhatFits) {
  EXPECT_EQ(narrow<int>(std::int64_t{2147483647}), 2147483647);
  EXPECT_EQ(narrow<int>(std::int64_t{-2147483648}), std::numeric_limits<int>::min());
  EXPECT_EQ(narrow<std::uint8_t>(255), 255);
  EXPECT_EQ(narrow<std::size_t>(std::int64_t{7}), 7u);
}

TEST(Integers, NarrowRefusesWhatDoesNot) {
  EXPECT_THROW(narrow<int>(std::int64_t{2147483648}), InvalidArgument);
  EXPECT_THROW(narrow<int>(std::int64_t{-2147483649}), InvalidArgument);
  EXPECT_THROW(narrow<int>(std::size_t{1} << 32), InvalidArgument);
  EXPECT_THROW(narrow<std::size_t>(-1), InvalidArgument);  // same bits, other sign
  EXPECT_THROW(narrow<std::int64_t>(std::numeric_limits<std::uint64_t>::max()), InvalidArgument);
  try {
    narrow<int>(std::int64_t{2147483648});
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "value 2147483648 does not fit into a 32-bit integer");
  }
}

TEST(Integers, CeilDivAndRoundUp) {
  for (int a = 0; a <= 40; ++a) {
    for (int b = 1; b <= 9; ++b) {
      const int quotient = ceil_div(a, b);
      EXPECT_GE(quotient * b, a);
      EXPECT_LT(quotient * b, a + b);
      EXPECT_EQ(round_up(a, b), quotient * b);
    }
  }
  // (a + b - 1) / b would overflow here.
  EXPECT_EQ(ceil_div(std::numeric_limits<std::int64_t>::max(), std::int64_t{2}),
            std::int64_t{1} << 62);
}

TEST(Error, RequireAndInvariantThrowTheirTypeWithTheText) {
  EXPECT_NO_THROW(require(true, "unused"));
  EXPECT_NO_THROW(invariant(true, "unused"));
  EXPECT_THROW(require<CommError>(false, "x"), CommError);
  try {
    require(false, "head_dim ", 300, ": expected at most ", 256);
    FAIL() << "did not throw";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "head_dim 300: expected at most 256");
  }
  try {
    invariant(false, "slot ", 3);
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(), "internal error: slot 3");
  }
}

}  // namespace
}  // namespace cpattn
