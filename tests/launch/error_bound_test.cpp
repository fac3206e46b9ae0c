#include "launch/error_bound.h"

#include <gtest/gtest.h>

#include <cmath>

namespace cpattn {
namespace {

TEST(ErrorBound, GrowsWithTheLogitsOnlyWhereTheyOutweighThePath) {
  const Arithmetic f32{.head_dim = 64};
  EXPECT_EQ(out_bound(f32, {512, 0.0}), kPathBound);
  EXPECT_EQ(out_bound(f32, {512, 2.0}), kPathBound);
  // twice sqrt(2 * 64) / 3 = 3.77 roundings of a logit of 1e4
  EXPECT_NEAR(out_bound(f32, {512, 1e4}), 2 * 3.7712 * 1e4 * 0x1p-24, 1e-7);
}

TEST(ErrorBound, TheContractIsTwiceTheExpectedErrorOfADefaultChunk) {
  const double expected = 0x1p-24 * std::sqrt((128.0 + 512.0 / 128.0) / 2.0);
  EXPECT_LE(2 * expected, kPathBound);
  EXPECT_GE(2 * expected, 0.95 * kPathBound);
  EXPECT_EQ(out_bound({.run_keys = 512}, {512, 0.0}), kPathBound);
}

TEST(ErrorBound, FewRowsAreFewDraws) {
  const double expected = 0x1p-24 * std::sqrt((128.0 + 512.0 / 128.0) / 2.0);
  EXPECT_NEAR(out_bound({.run_keys = 512}, {1, 0.0}), (1 + 4 / std::sqrt(2.0)) * expected, 1e-12);
  EXPECT_NEAR(out_bound({.run_keys = 512}, {2, 0.0}), 3 * expected, 1e-12);
  EXPECT_EQ(out_bound({.run_keys = 512}, {8, 0.0}), kPathBound);
}

TEST(ErrorBound, GrowsWithTheNumberOfTilesInARun) {
  const double million = 0x1p20;
  EXPECT_NEAR(out_bound({.run_keys = 1 << 20}, {512, 0.0}),
              2 * 0x1p-24 * std::sqrt((128.0 + million / 128.0) / 2.0), 1e-12);
  EXPECT_GT(lse_bound({.run_keys = 1 << 20}, {512, 0.0}), kPathBound);
}

TEST(ErrorBound, RoundedWeightsCostHalfAnUlpOfBf16) {
  EXPECT_NEAR(out_bound({.rounds_weights = true}, {512, 0.0}), kPathBound + 0x1p-8, 1e-12);
  EXPECT_NEAR(lse_bound({.rounds_weights = true}, {512, 0.0}), kPathBound + 0x1p-8, 1e-12);
}

TEST(ErrorBound, CancelledTermsCountWithTheirSize) {
  const Arithmetic f32{.head_dim = 96};
  const BoundedGroup group{.rows = 512, .logit_size = 300.0, .term_size = 7.0};
  EXPECT_NEAR(out_cancellation(f32, group), 7.0 * kPathBound, 1e-12);
  EXPECT_NEAR(lse_cancellation(f32, group), 2 * 0x1p-24 * std::sqrt(96.0 / 6 + 1) * 300, 1e-12);
  EXPECT_EQ(out_cancellation(f32, {512, 2.0}), 0.0);
  EXPECT_EQ(lse_cancellation(f32, {512, 2.0}), 0.0);
}

constexpr double kU = 0x1p-24;

double error_of(const Arithmetic& arithmetic, const reference::Sensitivity& sensitivity,
                double norm = 0.0, SummedOver summed_over = SummedOver::keys) {
  return gradient_error(arithmetic, summed_over, sensitivity, norm);
}

TEST(GradientBound, EachSensitivityHasItsOwnFactor) {
  const Arithmetic f32{.head_dim = 96, .value_dim = 24, .run_keys = 512, .run_rows = 480};
  const double path = (128.0 + 4.0) / 2;

  EXPECT_NEAR(error_of(f32, {.weight = 1.0}), kU * std::sqrt(3.6 * 3.6 + path), 1e-12);
  EXPECT_NEAR(error_of(f32, {.weight = 1.0}, 0.0, SummedOver::rows),
              kU * std::sqrt(3.6 * 3.6 + (48.0 + 10.0) / 2), 1e-12);
  EXPECT_NEAR(error_of(f32, {.logit = 1.0}), kU * std::sqrt(96.0 / 6 + 1), 1e-12);
  EXPECT_NEAR(error_of(f32, {.lse = 1.0}), kU, 1e-12);
  EXPECT_NEAR(error_of(f32, {.product = 1.0}), kU * std::sqrt(24.0 / 6), 1e-12);
  EXPECT_NEAR(error_of(f32, {.delta = 1.0}), kU * std::sqrt(24.0 / 6 + path), 1e-12);
  EXPECT_NEAR(error_of(f32, {3.0, 4.0, 7.0, 5.0, 6.0}),
              std::sqrt(std::pow(3 * error_of(f32, {.weight = 1.0}), 2) +
                        std::pow(4 * error_of(f32, {.logit = 1.0}), 2) +
                        std::pow(7 * error_of(f32, {.lse = 1.0}), 2) +
                        std::pow(5 * error_of(f32, {.product = 1.0}), 2) +
                        std::pow(6 * error_of(f32, {.delta = 1.0}), 2)),
              1e-12);
  EXPECT_EQ(error_of(f32, {}), 0.0);
}

TEST(GradientBound, WhatIsBelowTheNormalNumbersMayBeLost) {
  const double lost = error_of({}, {.underflow = 3.0});

  EXPECT_EQ(lost, 3 * 0x1p-126);
}

TEST(GradientBound, RoundedWeightsAndARoundedOutCount) {
  const double bf16_rms = 0x1p-8 / std::sqrt(3.0);

  EXPECT_NEAR(error_of({.rounds_weights = true}, {.weight = 1.0}), std::sqrt(2.0) * bf16_rms, 1e-6);
  EXPECT_NEAR(error_of({.rounds_weights = true}, {.delta = 1.0}), bf16_rms, 1e-6);
  EXPECT_NEAR(error_of({.out_dtype = DType::bf16}, {.delta = 1.0}), bf16_rms, 1e-6);
  EXPECT_LT(error_of({.out_dtype = DType::bf16}, {.weight = 1.0}), 1e-6);
}

TEST(GradientBound, WhatTermsHaveInCommonCountsWithTheNorm) {
  const Arithmetic f32;

  EXPECT_EQ(error_of(f32, {.weight = 1.0, .logit = 1.0, .lse = 1.0}, 0.5),
            error_of(f32, {.weight = 1.0, .logit = 1.0, .lse = 1.0}));
  EXPECT_NEAR(error_of(f32, {.weight = 1.0, .logit = 1.0, .lse = 1.0}, 3.0),
              3 * error_of(f32, {.weight = 1.0, .logit = 1.0, .lse = 1.0}), 1e-12);
  EXPECT_EQ(error_of(f32, {.product = 1.0, .delta = 1.0}, 3.0),
            error_of(f32, {.product = 1.0, .delta = 1.0}));
}

TEST(GradientBound, IsTwiceTheRootMeanSquareOfManyRows) {
  EXPECT_NEAR(gradient_bound(512, 9.0), 6.0, 1e-12);
  EXPECT_NEAR(gradient_bound(1, 9.0), 3.0 * (1 + 4 / std::sqrt(2.0)), 1e-12);
}

}  // namespace
}  // namespace cpattn
