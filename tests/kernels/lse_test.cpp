#include "kernels/lse.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/tile_kernels.h"
#include "src/device/memory.h"
#include "tests/support/random.h"

namespace cpattn {
namespace {

struct State {
  float m = kEmptyMax;
  float l = 0.0f;
  float o = 0.0f;

  float out() const { return l == 0.0f ? 0.0f : o / l; }
  float lse() const { return finalize_lse(m, l); }
};

/// A state that holds one number of mass exp(lse) and mean `out`; lse in natural units.
State state_of(float out, float lse) {
  if (lse == kEmptyMax) return {};
  return {static_cast<float>(static_cast<double>(lse) * kLog2e), 1.0f, out};
}

/// The merge that the kernels run: one row of one tile; states in slots 0 and 1, result in slot 2.
State merge(const State& a, const State& b) {
  using cpu::kQueryTile;
  const AttentionShape shape{1, 1, 1, 1, 1.0};
  const std::int64_t slot = cpu::state_floats(shape.value_dim);
  const Buffer slots(static_cast<std::size_t>(3 * slot) * sizeof(float));
  float* left = slots.as<float>();
  float* right = left + slot;
  const auto put = [](float* state, const State& value) {
    state[0] = value.m;
    state[kQueryTile] = value.l;
    state[2 * kQueryTile] = value.o;
  };
  put(left, a);
  put(right, b);
  const StateOp op{.kind = StateOpKind::merge, .dst = 2, .left = 0, .right = 1};
  cpu::TileJob job;
  job.shape = &shape;
  job.ops = &op;
  job.num_ops = 1;
  job.num_rows = 1;
  job.carried = left;
  job.carried_slot = slot;
  cpu::generic_tile_kernels().run_tile(job, {});
  const float* merged = right + slot;
  return {merged[0], merged[kQueryTile], merged[2 * kQueryTile]};
}

bool same_bits(const State& a, const State& b) {
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  return bits(a.m) == bits(b.m) && bits(a.l) == bits(b.l) && bits(a.o) == bits(b.o);
}

TEST(Lse, MergeByHand) {
  const State merged = merge(state_of(1.0f, 0.0f), state_of(5.0f, std::log(3.0f)));

  // ln 3 in units of log2 is rounded once (relative 2^-24), so is each of a dozen operations; two
  // powers have a documented error of 2e-7.
  constexpr double kBound = 12 * 0x1p-24 + 2 * 2e-7;
  EXPECT_NEAR(merged.lse(), std::log(4.0), kBound);
  EXPECT_NEAR(merged.out(), 4.0, 4 * kBound);
}

TEST(BC_029, EmptyStatesAreNeutralBitForBit) {
  const State empty, full{2.25f, 1.7f, -5.1f};

  EXPECT_TRUE(same_bits(merge(empty, empty), empty));
  EXPECT_TRUE(same_bits(merge(empty, full), full));
  EXPECT_TRUE(same_bits(merge(full, empty), full));
  for (int place = 0; place < 4; ++place) {
    State fold;
    for (int i = 0; i < 4; ++i) fold = merge(fold, i == place ? full : empty);
    EXPECT_TRUE(same_bits(fold, full)) << "non-empty state in place " << place;
  }
  EXPECT_EQ(empty.lse(), kEmptyMax);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(empty.out()), 0u);
}

TEST(Lse, AWideGapNeitherOverflowsNorVanishes) {
  // exp(89) is beyond f32, exp(200) far beyond: only differences to the maximum may be raised.
  for (const float gap : {89.0f, 200.0f, 1e4f}) {
    const State far = merge(state_of(1.0f, 0.0f), state_of(5.0f, gap));
    const State swapped = merge(state_of(5.0f, gap), state_of(1.0f, 0.0f));

    EXPECT_NEAR(far.lse(), gap, gap * 0x1p-22) << gap;
    EXPECT_NEAR(far.out(), 5.0f, 5 * 0x1p-22) << gap;
    EXPECT_TRUE(same_bits(far, swapped)) << gap;
  }
}

TEST(Lse, SwappingSidesChangesOnlyRounding) {
  for (std::uint64_t i = 0; i < 200; ++i) {
    const State a{10 * testing::random_normal(1, i), 1.5f, testing::random_normal(2, i)};
    const State b{10 * testing::random_normal(3, i), 2.5f, testing::random_normal(4, i)};

    const State ab = merge(a, b), ba = merge(b, a);

    // l and o are sums of two products; each order rounds one of them separately.
    EXPECT_EQ(ab.m, ba.m);
    EXPECT_NEAR(ab.l, ba.l, 4 * 0x1p-24 * ab.l);
    EXPECT_NEAR(ab.o, ba.o, 4 * 0x1p-24 * (std::abs(a.o) + std::abs(b.o)));
  }
}

TEST(Lse, GroupingChangesOnlyRounding) {
  // Two groupings of the same eight states: 7 merges each, every one with two powers (documented
  // error 2e-7) and at most 4 roundings (product, fma, two differences of maxima).
  constexpr double kBound = 2 * 7 * (2 * 2e-7 + 4 * 0x1p-24);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<State> states;
    double magnitude = 0.0;
    for (std::uint64_t i = 0; i < 8; ++i) {
      const float o = testing::random_normal(seed, 3 * i);
      states.push_back({3 * testing::random_normal(seed, 3 * i + 1), 1.0f, o});
      magnitude = std::max(magnitude, std::abs(static_cast<double>(o)));
    }

    State left;
    for (const State& state : states) left = merge(left, state);
    std::vector<State> tree = states;
    for (std::size_t width = 8; width > 1; width /= 2)
      for (std::size_t i = 0; i < width / 2; ++i) tree[i] = merge(tree[2 * i], tree[2 * i + 1]);

    // m is an exact element of the inputs: the same in every grouping.
    EXPECT_EQ(left.m, tree[0].m);
    EXPECT_NEAR(left.lse(), tree[0].lse(), kBound + 2 * 0x1p-24 * std::abs(left.lse()));
    EXPECT_NEAR(left.out(), tree[0].out(), 2 * kBound * magnitude);
  }
}

TEST(Lse, IsTheNaturalLogarithmOfTheSum) {
  EXPECT_EQ(finalize_lse(0.0f, 1.0f), 0.0f);
  EXPECT_EQ(finalize_lse(0.0f, 8.0f), static_cast<float>(std::log(8.0)));
  EXPECT_EQ(finalize_lse(3.0f, 1.0f), static_cast<float>(std::log(8.0)));
  EXPECT_EQ(finalize_lse(kEmptyMax, 0.0f), kEmptyMax);
  EXPECT_TRUE(std::isnan(finalize_lse(std::nanf(""), 1.0f)));
  EXPECT_TRUE(std::isnan(finalize_lse(1.0f, std::nanf(""))));
}

TEST(Lse, NanIsNotLostInAMerge) {
  const State poisoned{1.0f, std::nanf(""), std::nanf("")}, fine{5.0f, 1.0f, 1.0f};

  EXPECT_TRUE(std::isnan(merge(poisoned, fine).l));
  EXPECT_TRUE(std::isnan(merge(fine, poisoned).o));
}

}  // namespace
}  // namespace cpattn
