#include "src/base/digest.h"

#include <gtest/gtest.h>

namespace cpattn {
namespace {

std::uint64_t digest_of(std::initializer_list<std::string_view> texts) {
  Digest digest;
  for (const std::string_view text : texts) digest.add(text);
  return digest.value();
}

TEST(Digest, IsFnv1aOverLittleEndianBytes) {
  EXPECT_EQ(Digest().value(), 0xcbf29ce484222325ull);  // the offset basis
  // By hand: 1 is the byte 1 and seven zero bytes.
  std::uint64_t expected = (0xcbf29ce484222325ull ^ 1) * 0x100000001b3ull;
  for (int i = 0; i < 7; ++i) expected *= 0x100000001b3ull;
  Digest digest;
  digest.add(std::int64_t{1});
  EXPECT_EQ(digest.value(), expected);
}

TEST(Digest, BordersBetweenTextsCount) {
  EXPECT_NE(digest_of({"ab", "c"}), digest_of({"a", "bc"}));
  EXPECT_NE(digest_of({"abc"}), digest_of({"abc", ""}));
  EXPECT_NE(digest_of({"a", "b"}), digest_of({"b", "a"}));
  EXPECT_EQ(digest_of({"a", "b"}), digest_of({"a", "b"}));
}

TEST(Digest, EveryBitOfANumberCounts) {
  Digest zero;
  zero.add(std::int64_t{0});
  for (int bit = 0; bit < 64; ++bit) {
    Digest digest;
    digest.add(static_cast<std::int64_t>(std::uint64_t{1} << bit));
    EXPECT_NE(digest.value(), zero.value()) << bit;
  }
}

}  // namespace
}  // namespace cpattn
