#include "kernels/mask.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace cpattn {
namespace {

TEST(BlockMask, FullSeesEveryKey) {
  const BlockMask mask{MaskKind::full, -7};

  EXPECT_EQ(mask.visible_keys(0, 5), 5);
  EXPECT_EQ(mask.visible_keys(100, 5), 5);
  EXPECT_EQ(mask.visible_keys(0, 0), 0);
}

TEST(BlockMask, CausalGrowsByOneKeyPerRowAndIsClamped) {
  const BlockMask mask{MaskKind::causal, -1};

  EXPECT_EQ(mask.visible_keys(0, 3), 0);
  EXPECT_EQ(mask.visible_keys(1, 3), 0);
  EXPECT_EQ(mask.visible_keys(2, 3), 1);
  EXPECT_EQ(mask.visible_keys(4, 3), 3);
  EXPECT_EQ(mask.visible_keys(5, 3), 3);
}

TEST(BlockMask, PositionsBeyond32BitsAreExact) {
  constexpr std::int64_t kFar = std::int64_t{1} << 40;
  const BlockMask mask{MaskKind::causal, 2 - kFar};

  EXPECT_EQ(mask.visible_keys(kFar - 2, 4), 0);
  EXPECT_EQ(mask.visible_keys(kFar, 4), 2);
}

}  // namespace
}  // namespace cpattn
