// K10 backward mathematics, and the backward parts of the other kinds.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/cases/closed_gradient.h"

namespace cpattn::testing {
namespace {

void expect_values(const GradientAnswer& answer, const std::vector<double>& dk,
                   const std::vector<double>& dv) {
  for (std::size_t j = 0; j < dk.size(); ++j)
    EXPECT_NEAR(answer.dk(static_cast<std::int64_t>(j), 0).value, dk[j], 1e-6) << j;
  for (std::size_t j = 0; j < dv.size(); ++j)
    EXPECT_NEAR(answer.dv(static_cast<std::int64_t>(j), 0).value, dv[j], 1e-6) << j;
}

TEST(BC_012, PaddingBetweenDocumentsHasNoGradient) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem =
        even_weights(batch_from_padded({0, 4, 12}, {3, 5}, 12), MaskKind::causal, dtype, 2, 1);
    ASSERT_TRUE(std::isnan(problem.v.at(3, 0, 0)) && std::isnan(problem.q.at(10, 1, 0)));
    const Upstream upstream = ones_upstream(problem);
    ASSERT_TRUE(std::isnan(upstream.dout.at(3, 0, 0)));
    const GradientAnswer answer = even_weights_answer(problem);
    expect_values(answer, {}, {2 * 1.833333, 2 * .833333, 2 * .333333});  // two heads
    expect_gradients_everywhere(problem, upstream, answer);
  }
}

// Random real rows in slots of eight; whatever is in the other rows never gets into a sum.
TEST(BC_013, PaddingAfterTheReduction) {
  for (const auto& [dtype, bound] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 2e-2}}) {
    AttentionCase problem =
        make_random_case(make_shape(2, 1, 8, 8), batch_from_padded({0, 8, 16}, {3, 5}, 16),
                         test_config(MaskKind::full, 2), dtype, 1);
    problem.out_dtype = DType::f32;
    Upstream upstream = random_upstream(problem, 1, false);
    for (const std::int64_t row : {3, 7, 13, 15})
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t d = 0; d < 8; ++d) upstream.dout.set(row, h, d, kNan);
    const reference::Gradient exact = reference_gradient_of(problem, upstream);
    for_every_backward(problem, upstream, {}, [&](const Gradients& result) {
      expect_padding_untouched(problem, result);
      EXPECT_LE(relative_l2(problem, result.dq, false, exact.dq.values), bound);
      EXPECT_LE(relative_l2(problem, result.dk, true, exact.dk.values), bound);
      EXPECT_LE(relative_l2(problem, result.dv, true, exact.dv.values), bound);
    });
  }
}

TEST(BC_017, KeysThatNoQuerySeesHaveZeroGradients) {
  const SequenceBatch batch = batch_from_cu_seqlens({0, 0, 3, 3, 5}, {0, 2, 5, 5, 9}, 5, 9);
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = even_weights(batch, MaskKind::full, dtype);
    const GradientAnswer answer = even_weights_answer(problem);
    expect_values(answer, {0, 0}, {0, 0, 1, 1, 1, .5, .5, .5, .5});
    expect_gradients_everywhere(problem, ones_upstream(problem), answer);
    for (const int world_size : {1, 2}) {
      const Gradients result = differentiate(problem, ones_upstream(problem), world_size);
      for (const std::int64_t j : {0, 1}) {  // not nearly zero: all bits are 0
        EXPECT_EQ(result.dk.bits_at(j, 0, 0), 0u);
        EXPECT_EQ(result.dv.bits_at(j, 0, 0), 0u);
      }
    }
  }
}

// Rows past the last document are no rank's: the sum over all rows that are is finite.
TEST(BC_019, RowsPastTheLastDocumentHaveNoGradient) {
  const AttentionCase problem =
      make_random_case(make_shape(2, 1, 8, 8), batch_from_cu_seqlens({0, 3, 7}, {0, 3, 7}, 10, 10),
                       test_config(MaskKind::causal, 1), DType::f32, 1);
  ASSERT_TRUE(std::isnan(problem.k.at(8, 0, 0)));
  for_every_backward(problem, random_upstream(problem, 1), {}, [&](const Gradients& result) {
    expect_padding_untouched(problem, result);
    double sum = 0.0;
    for (std::int64_t row = 0; row < 7; ++row)
      sum += result.dq.at(row, 1, 7) + result.dk.at(row, 0, 7) + result.dv.at(row, 0, 7);
    EXPECT_TRUE(std::isfinite(sum));
  });
}

TEST(BC_023, GradientsAreSummedOverTheGroup) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = even_weights(batch_of_one(8, 8), MaskKind::causal, dtype, 8, 2);
    const GradientAnswer answer = even_weights_answer(problem);
    std::vector<double> dk{-2.641071, -.923214, .044643, .595833, .855357, .889881, .741071, .4375};
    std::vector<double> dv{2.717857, 1.717857, 1.217857, .884524, .634524, .434524, .267857, .125};
    for (std::vector<double>* values : {&dk, &dv})
      for (double& x : *values) x *= 4;
    for (std::size_t j = 0; j < 8; ++j) {  // six digits, times four
      EXPECT_NEAR(answer.dk(static_cast<std::int64_t>(j), 1).value, dk[j], 4e-6);
      EXPECT_NEAR(answer.dv(static_cast<std::int64_t>(j), 1).value, dv[j], 4e-6);
    }
    expect_gradients_everywhere(problem, ones_upstream(problem), answer);
  }
}

TEST(BC_028, RowsBeforeTheFirstKeyHaveZeroGradients) {
  const SequenceBatch batch{{{0, 8, 2, 6}}, 8, 8};
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = even_weights(batch, MaskKind::causal, dtype);
    ASSERT_TRUE(std::isnan(problem.k.at(1, 0, 0)));
    expect_gradients_everywhere(problem, ones_upstream(problem), even_weights_answer(problem));
    // With keys that are not alike, dq of the first two rows is still 0, bit for bit.
    AttentionCase random =
        make_random_case(make_shape(1, 1, 8, 8), batch, test_config(MaskKind::causal, 1), dtype, 3);
    random.out_dtype = DType::f32;
    for_every_backward(random, ones_upstream(random), {}, [&](const Gradients& result) {
      for (std::int64_t d = 0; d < 8; ++d) {
        EXPECT_EQ(result.dq.bits_at(0, 0, d), 0u);
        EXPECT_EQ(result.dq.bits_at(1, 0, d), 0u);
      }
      expect_padding_untouched(random, result);
    });
  }
}

TEST(BC_033, MoreQueriesThanKeysBackward) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = even_weights(batch_of_one(6, 4), MaskKind::causal, dtype);
    const GradientAnswer answer = even_weights_answer(problem);
    expect_values(answer, {-.958333, .125, .458333, .375}, {2.083333, 1.083333, .583333, .25});
    expect_gradients_everywhere(problem, ones_upstream(problem), answer);
  }
}

// Q = e0, K = [4 e0, 0], V = [1, 0]: p = logistic(4 scale), dq = scale p (1 - p) 4 e0.
TEST(BC_045, GradientsScaleWithTheCallersScale) {
  for (const DType dtype : kAllDTypes) {
    AttentionShape stated = make_shape(1, 1, 64, 64);
    stated.softmax_scale = 0.25;
    for (const AttentionShape& shape : {stated, make_shape(1, 1, 192, 128)}) {
      AttentionCase problem =
          make_case(shape, batch_of_one(1, 2), test_config(MaskKind::full, 1), dtype);
      problem.out_dtype = DType::f32;
      problem.q.fill([](auto, auto, std::int64_t d) { return d == 0 ? 1.0f : 0.0f; });
      problem.k.fill([](auto j, auto, auto d) { return j + d == 0 ? 4.0f : 0.0f; });
      problem.v.fill([](std::int64_t j, auto...) { return j == 0 ? 1.0f : 0.0f; });
      Upstream upstream = ones_upstream(problem);
      upstream.dout.fill([](auto, auto, std::int64_t d) { return d == 0 ? 1.0f : 0.0f; });
      const double scale = shape.softmax_scale, p = 1 / (1 + std::exp(-4 * scale));
      for_every_backward(problem, upstream, {}, [&](const Gradients& result) {
        const double slack = relative_slack(problem);
        EXPECT_NEAR(result.dq.at(0, 0, 0), scale * p * (1 - p) * 4, slack * scale * p * 2 * 4);
        EXPECT_NEAR(result.dk.at(0, 0, 0), scale * p * (1 - p), slack * scale * p * 2);
        EXPECT_NEAR(result.dk.at(1, 0, 0), -scale * p * (1 - p), slack * scale * p * 2);
        EXPECT_NEAR(result.dv.at(0, 0, 0), p, slack * p);
        EXPECT_EQ(result.dq.at(0, 0, 1), 0.0f);
      });
    }
  }
}

/// Q = 0, K_j = V_j = j, scale 1: p = 1/8, dq = sum_j (j - 3.5) j / 8 = (8^2 - 1) / 12.
AttentionCase variance_case(DType dtype) {
  AttentionCase problem = even_weights(batch_of_one(8, 8), MaskKind::full, dtype);
  problem.q.fill([](auto...) { return 0.0f; });
  problem.k.fill([](std::int64_t j, auto...) { return static_cast<float>(j); });
  return problem;
}

GradientAnswer variance_answer() {
  return {.dq =
              [](auto, auto) {
                Sum sum;
                for (int j = 0; j < 8; ++j) sum.add((j - 3.5) * j / 8, (j + 3.5) * j / 8);
                return sum;
              },
          .dk = [](auto, auto) { return Sum{}; },
          .dv =
              [](auto, auto) {
                return Sum{1.0, 1.0};
              }};
}

TEST(BC_046, DeltaIsThatOfTheMergedOut) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = variance_case(dtype);
    ASSERT_EQ(variance_answer().dq(0, 0).value, 5.25);
    expect_gradients_everywhere(problem, ones_upstream(problem), variance_answer(),
                                {.chunk_sizes = {1, 2, 4}});
    const AttentionCase second = even_weights(batch_of_one(8, 8), MaskKind::full, dtype);
    const GradientAnswer answer = even_weights_answer(second);
    expect_values(answer, {-3.5, -2.5, -1.5, -.5, .5, 1.5, 2.5, 3.5}, {});
    expect_gradients_everywhere(second, ones_upstream(second), answer, {.chunk_sizes = {1, 2, 4}});
  }
}

// A backward that worked on its own keys twice would give -1.75 on rank 0 and 12.25 on rank 1.
TEST(BC_047, TheKeysOfTheHopAreUsed) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = variance_case(dtype);
    problem.config.chunk_tokens = 4;
    problem.config.sharding = ShardingKind::contiguous;
    const Gradients result = differentiate(problem, ones_upstream(problem), 2);
    expect_gradient(problem, result.dq, false, variance_answer().dq, "dq");
  }
}

TEST(BC_048, GradientsEqualASingleDevice) {
  for (const auto& [dtype, bound] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 2e-2}}) {
    AttentionCase problem = make_random_case(make_shape(4, 2, 16, 16), batch_of_one(64, 64),
                                             test_config(MaskKind::causal, 8), dtype, 0);
    problem.out_dtype = DType::f32;
    for (const bool has_dlse : {false, true}) {
      const Upstream upstream = random_upstream(problem, 48, has_dlse);
      const reference::Gradient exact = reference_gradient_of(problem, upstream);
      for_every_backward(problem, upstream, {.chunk_sizes = {8, 16}}, [&](const Gradients& result) {
        EXPECT_LE(relative_l2(problem, result.dq, false, exact.dq.values), bound);
        EXPECT_LE(relative_l2(problem, result.dk, true, exact.dk.values), bound);
        EXPECT_LE(relative_l2(problem, result.dv, true, exact.dv.values), bound);
      });
    }
  }
}

// Each row of ds sums to zero, so equal keys leave nothing of dq but the rounding of its terms.
TEST(BC_048, EveryRowOfDsSumsToZero) {
  for (const auto& [dtype, bound] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 2e-2}}) {
    AttentionCase problem = make_random_case(make_shape(4, 2, 16, 16), batch_of_one(64, 64),
                                             test_config(MaskKind::causal, 8), dtype, 0);
    problem.out_dtype = DType::f32;
    problem.k.fill([](auto, std::int64_t h, std::int64_t d) {
      return static_cast<float>(1 + h) - static_cast<float>(d % 3);
    });
    const Upstream upstream = random_upstream(problem, 48, false);
    const reference::Gradient exact = reference_gradient_of(problem, upstream);
    double terms = 0.0;  // 2-norm of all ds k
    for (const reference::Sensitivity& row : exact.dq.sensitivities)
      terms += row.weight * row.weight;
    for_every_backward(problem, upstream, {.chunk_sizes = {8}}, [&](const Gradients& result) {
      double squares = 0.0;
      for (std::int64_t row = 0; row < 64; ++row)
        for (std::int64_t h = 0; h < 4; ++h)
          for (std::int64_t d = 0; d < 16; ++d)
            squares += std::pow(static_cast<double>(result.dq.at(row, h, d)), 2);
      EXPECT_LE(std::sqrt(squares), bound * std::sqrt(terms));
    });
  }
}

TEST(BC_066, RepeatedBackwardsUnderRandomDelaysHaveTheSameBits) {
  AttentionCase problem = make_random_case(make_shape(4, 1, 32, 32), pack({1, 33, 64, 7}),
                                           test_config(MaskKind::causal, 8), DType::bf16, 66);
  const Upstream upstream = random_upstream(problem, 66);
  const Gradients expected = differentiate(problem, upstream);
  for (std::int64_t seed = 1; seed <= 5; ++seed)
    for (const int world_size : {1, 2}) {
      problem.config.shuffle_arrival = seed;
      EXPECT_TRUE(
          same(differentiate(problem, upstream, world_size,
                             {.shuffle_delivery = static_cast<std::uint64_t>(seed), .repeats = 2}),
               expected));
    }
}

}  // namespace
}  // namespace cpattn::testing
