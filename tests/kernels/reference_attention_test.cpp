#include "kernels/reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "src/base/error.h"
#include "tests/support/attention_case.h"

namespace cpattn::testing {
namespace {

constexpr double kEmptyLse = -std::numeric_limits<double>::infinity();

/// One head, D = Dv = 1, scale 1; q and k zero, so every visible logit is 0.
AttentionCase zero_logits(std::int64_t q_tokens, const std::vector<float>& values, MaskKind mask) {
  AttentionShape shape{1, 1, 1, 1, 1.0};
  const auto kv_tokens = static_cast<std::int64_t>(values.size());
  AttentionCase problem =
      make_case(shape, batch_of_one(q_tokens, kv_tokens), test_config(mask, 512));
  problem.q.fill([](auto...) { return 0.0f; });
  problem.k.fill([](auto...) { return 0.0f; });
  problem.v.fill([&](std::int64_t t, auto...) { return values[static_cast<std::size_t>(t)]; });
  return problem;
}

TEST(Reference, ZeroLogitsAverageTheValues) {
  const auto three = reference_of(zero_logits(1, {1, 2, 6}, MaskKind::full));
  const auto two = reference_of(zero_logits(1, {1, 2}, MaskKind::full));

  EXPECT_DOUBLE_EQ(three.out[0], 3.0);
  EXPECT_DOUBLE_EQ(three.lse[0], std::log(3.0));
  EXPECT_DOUBLE_EQ(two.out[0], 1.5);
  EXPECT_DOUBLE_EQ(two.lse[0], std::log(2.0));
}

TEST(Reference, NoKeyMeansZeroAndMinusInfinity) {
  const auto nothing = reference_of(zero_logits(2, {}, MaskKind::full));

  EXPECT_EQ(nothing.out, (std::vector<double>{0.0, 0.0}));
  EXPECT_EQ(nothing.lse, (std::vector<double>{kEmptyLse, kEmptyLse}));
}

TEST(Reference, CausalIsBottomRightAligned) {
  const auto one = reference_of(zero_logits(1, {1, 2, 6}, MaskKind::causal));
  const auto two = reference_of(zero_logits(2, {1, 2, 6}, MaskKind::causal));
  const auto more_queries = reference_of(zero_logits(4, {1, 2}, MaskKind::causal));

  EXPECT_DOUBLE_EQ(one.out[0], 3.0);
  EXPECT_DOUBLE_EQ(two.out[0], 1.5);
  EXPECT_DOUBLE_EQ(two.out[1], 3.0);
  EXPECT_DOUBLE_EQ(two.lse[0], std::log(2.0));
  EXPECT_EQ(more_queries.out, (std::vector<double>{0.0, 0.0, 1.0, 1.5}));
  EXPECT_EQ(more_queries.lse[1], kEmptyLse);
  EXPECT_DOUBLE_EQ(more_queries.lse[2], 0.0);
}

TEST(Reference, AHiddenKeyIsNeverRead) {
  AttentionCase problem = zero_logits(3, {1, 2, kNan}, MaskKind::causal);
  problem.k.set(2, 0, 0, kNan);

  const auto result = reference_of(problem);

  EXPECT_DOUBLE_EQ(result.out[0], 1.0);
  EXPECT_DOUBLE_EQ(result.out[1], 1.5);
  EXPECT_TRUE(std::isnan(result.out[2]));
  EXPECT_TRUE(std::isnan(result.lse[2]));
}

TEST(Reference, TwoLogitsByHand) {
  // s = scale * q.k = 0.25 * (4, 0): weights e / (1 + e) and 1 / (1 + e).
  AttentionCase problem =
      make_case({1, 1, 2, 1, 0.25}, batch_of_one(1, 2), test_config(MaskKind::full, 512));
  problem.q.fill([](auto, auto, std::int64_t d) { return d == 0 ? 1.0f : 0.0f; });
  problem.k.fill([](std::int64_t t, auto, std::int64_t d) { return t + d == 0 ? 4.0f : 0.0f; });
  problem.v.fill([](std::int64_t t, auto...) { return t == 0 ? 1.0f : 0.0f; });

  const auto result = reference_of(problem);

  EXPECT_NEAR(result.out[0], 0.7310585786300049, 1e-15);
  EXPECT_NEAR(result.lse[0], 1.3132616875182228, 1e-15);
  EXPECT_NEAR(result.logit_size[0], 0.7310585786300049, 1e-15);  // of the logits 1 and 0
  EXPECT_NEAR(result.part_size[0], 0.7310585786300049 / std::sqrt(2.0), 1e-15);  // of two channels
  EXPECT_NEAR(result.term_size[0], 0.7310585786300049, 1e-15);  // of the values 1 and 0
}

TEST(Reference, LogitsFarApartAndFarOut) {
  AttentionCase problem = zero_logits(1, {0, 1, 2, 3}, MaskKind::full);
  problem.q.set(0, 0, 0, 1.0f);
  const std::vector<float> logits{1e4f, 1e4f + 1, -1e4f, -1e4f};
  problem.k.fill([&](std::int64_t t, auto...) { return logits[static_cast<std::size_t>(t)]; });

  const auto result = reference_of(problem);

  EXPECT_NEAR(result.out[0], 1.0 / (1.0 + std::exp(-1.0)), 1e-15);
  EXPECT_NEAR(result.lse[0], 1e4 + std::log1p(std::exp(1.0)), 1e-11);
}

TEST(Reference, QueryHeadsShareTheirKvHead) {
  AttentionCase problem =
      make_case({4, 2, 1, 1, 1.0}, batch_of_one(1, 2), test_config(MaskKind::full, 512));
  problem.q.fill([](auto...) { return 0.0f; });
  problem.k.fill([](auto...) { return 0.0f; });
  problem.v.fill([](auto, std::int64_t h, auto) { return h == 0 ? 10.0f : 20.0f; });

  EXPECT_EQ(reference_of(problem).out, (std::vector<double>{10, 10, 20, 20}));
}

TEST(Reference, DocumentsAreApartAndPaddingIsEmpty) {
  const SequenceBatch batch = batch_from_padded({0, 3, 5}, {2, 2}, 6);
  AttentionCase problem = make_case({1, 1, 1, 1, 1.0}, batch, test_config(MaskKind::full, 512));
  for (const std::int64_t row : {0, 1, 3, 4}) {
    problem.q.set(row, 0, 0, 0.0f);
    problem.k.set(row, 0, 0, 0.0f);
    problem.v.set(row, 0, 0, static_cast<float>(row));
  }

  const auto result = reference_of(problem);

  EXPECT_EQ(result.out, (std::vector<double>{0.5, 0.5, 0, 3.5, 3.5, 0}));
  EXPECT_EQ(result.lse[2], kEmptyLse);
  EXPECT_EQ(result.lse[5], kEmptyLse);
}

TEST(Reference, ChosenRowsEqualThoseOfTheWhole) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const AttentionCase problem = make_random_case(
        make_shape(4, 2, 5, 3), batch_from_cu_seqlens({0, 4, 11}, {0, 6, 9}, 11, 9),
        test_config(MaskKind::causal, 512), dtype, 7);
    const std::vector<std::int64_t> rows{10, 0, 5};

    const auto whole = reference_of(problem);
    const auto some =
        reference::attention({problem.shape, problem.batch, problem.config.mask, problem.q.view(),
                              problem.k.view(), problem.v.view(), rows, 3});

    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t row = static_cast<std::size_t>(rows[i]) * 4 + j;
        EXPECT_EQ(some.lse[i * 4 + j], whole.lse[row]);
        for (std::size_t d = 0; d < 3; ++d)
          EXPECT_EQ(some.out[(i * 4 + j) * 3 + d], whole.out[row * 3 + d]);
      }
  }
}

TEST(Reference, TensorsThatDoNotFitAreRefused) {
  const AttentionCase problem = make_random_case(make_shape(4, 2, 5, 3), batch_of_one(4, 6),
                                                 test_config(MaskKind::full, 512), DType::f32, 7);
  const auto attend = [&](const AnyConstTensor& v, std::vector<std::int64_t> rows) {
    return reference::attention({problem.shape, problem.batch, MaskKind::full, problem.q.view(),
                                 problem.k.view(), v, rows, 1});
  };
  AnyConstTensor spread = problem.v.view();
  spread.strides[2] = 2;

  EXPECT_NO_THROW(attend(problem.v.view(), {3}));
  EXPECT_THROW(attend(problem.q.view(), {}), InvalidArgument);
  EXPECT_THROW(attend(spread, {}), InvalidArgument);
  EXPECT_THROW(attend(problem.v.view(), {4}), InvalidArgument);
  EXPECT_THROW(attend(problem.v.view(), {-1}), InvalidArgument);
}

}  // namespace
}  // namespace cpattn::testing
