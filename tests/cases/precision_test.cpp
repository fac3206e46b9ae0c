// K09 precision, extreme logits and scale; K14 determinism.
#include <cmath>
#include <vector>

#include "tests/cases/closed_form.h"
#include "tests/support/error_bound.h"

namespace cpattn::testing {
namespace {

// 64 blocks of two keys with means 1 + k / 256: a merge that rounds to bf16 never leaves 1.
TEST(BC_038, ManyMergesDoNotRoundToSixteenBits) {
  AttentionCase problem = u_recipe(batch_of_one(3, 128), MaskKind::full, DType::bf16);
  problem.v.fill([](std::int64_t j, auto...) {
    const std::int64_t k = j / 2;
    return 1.0f + static_cast<float>(j % 2 == 0 ? k / 2 : (k + 1) / 2) / 128;
  });
  const double mean = 1.0 + 31.5 / 256;
  const auto answer = [&](auto, auto) { return RowAnswer{mean, std::log(128.0)}; };
  for (const DType out_dtype : {DType::bf16, DType::f32}) {
    problem.out_dtype = out_dtype;
    expect_everywhere(problem, answer, {.chunk_sizes = {2}});
  }
  problem.out_dtype = DType::bf16;
  EXPECT_EQ(attend(problem, 4).out.at(0, 0, 0), 1.125f);
}

// The error at four ranks is that at one rank, bit for bit, and within the bound of either.
TEST(BC_038, TheErrorDoesNotGrowWithTheRanks) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem = make_random_case(make_shape(1, 1, 64, 64), batch_of_one(64, 4096),
                                                   test_config(MaskKind::causal, 512), dtype, 38);
    const Attended one = attend(problem), four = attend(problem, 4);
    EXPECT_TRUE(bits_equal(four.out, one.out));
    EXPECT_TRUE(near_reference(problem, four, error_model(default_kernels(), dtype, dtype)));
  }
}

/// D = 1, q = 1, scale 1: the logits are the keys; V[j] = j.
AttentionCase logits_case(const std::vector<float>& logits, std::int64_t rows, DType dtype) {
  const auto keys = static_cast<std::int64_t>(logits.size());
  AttentionCase problem =
      make_case({1, 1, 1, 1, 1.0}, batch_of_one(rows, keys), test_config(MaskKind::full, 1), dtype);
  problem.q.fill([](auto...) { return 1.0f; });
  problem.k.fill([&](std::int64_t j, auto...) { return logits[static_cast<std::size_t>(j)]; });
  problem.v.fill([](std::int64_t j, auto...) { return static_cast<float>(j); });
  problem.out_dtype = DType::f32;
  return problem;
}

// 1e4 is a number of f32 and f16, 1e4 + 1 of f32 only. The slack is the report's: 1e-5 on out, and
// a relative 1e-6 on an lse near 1e4.
TEST(BC_040, LogitsOfTenThousandEitherWay) {
  constexpr float kBig = 1e4f;
  const Slack slack{.out = 1e-5, .relative = 1e-6};
  for (const DType dtype : {DType::f32, DType::f16}) {
    const double lse = 1e4 + std::log(4.0);
    expect_everywhere(
        logits_case({kBig, kBig, kBig, kBig, -kBig, -kBig, -kBig, -kBig}, 8, dtype),
        [&](auto, auto) {
          return RowAnswer{1.5, lse};
        },
        {.chunk_sizes = {1, 4}}, slack);
    expect_everywhere(
        logits_case({-kBig, -kBig, -kBig, -kBig, kBig, kBig, kBig, kBig}, 8, dtype),
        [&](auto, auto) {
          return RowAnswer{5.5, lse};
        },
        {.chunk_sizes = {1, 4}}, slack);
  }
  const double late = 1 / (1 + std::exp(-1.0));
  expect_everywhere(
      logits_case({kBig, kBig, kBig, kBig, kBig + 1, kBig + 1, kBig + 1, kBig + 1}, 8, DType::f32),
      [&](auto, auto) {
        return RowAnswer{1.5 * (1 - late) + 5.5 * late,
                         1e4 + std::log(4.0) + std::log1p(std::exp(1.0))};
      },
      {.chunk_sizes = {1, 4}}, slack);
}

TEST(BC_042, RowSumsDoNotSaturate) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    AttentionCase problem = u_recipe(batch_of_one(1, 4096), MaskKind::full, dtype);
    problem.v.fill([](auto...) { return 1.0f; });
    for_every_way(problem, {.chunk_sizes = {64, 512, 4096}}, [&](const Attended& result) {
      EXPECT_EQ(result.out.at(0, 0, 0), 1.0f);
      EXPECT_EQ(result.lse[0], static_cast<float>(std::log(4096.0)));
    });
  }
}

TEST(BC_043, LseIsNeverRoundedToSixteenBits) {
  AttentionCase problem = u_recipe(batch_of_one(1, 3096), MaskKind::full, DType::bf16);
  problem.v.fill([](std::int64_t j, auto...) { return j < 3000 ? 0.0f : 1.0f; });
  problem.out_dtype = DType::f32;
  expect_everywhere(problem,
                    [](auto, auto) {
                      return RowAnswer{96.0 / 3096, std::log(3096.0)};
                    },
                    {.chunk_sizes = {64, 3000}});
}

// Numerator and denominator take the same rounding of the weights, so values of 1 average to 1.
TEST(BC_044, WeightsSumToOne) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    std::vector<float> logits(8192);
    for (std::size_t j = 0; j < logits.size(); ++j) logits[j] = random_normal(44, j);
    AttentionCase problem = logits_case(logits, 1, dtype);
    problem.v.fill([](auto...) { return 1.0f; });
    problem.out_dtype = dtype;
    const double lse = reference_of(problem).lse[0];
    for_every_way(problem, {.chunk_sizes = {512, 8192}}, [&](const Attended& result) {
      EXPECT_NEAR(result.out.at(0, 0, 0), 1.0, epsilon(dtype)) << name_of(dtype);
      EXPECT_NEAR(result.lse[0], lse, 1e-3) << name_of(dtype);
    });
  }
}

/// q = e0, K = [4 e0, 0], V = [1, 0]: out is the logistic function of 4 scale.
AttentionCase scale_case(const AttentionShape& shape, DType dtype) {
  AttentionCase problem =
      make_case(shape, batch_of_one(1, 2), test_config(MaskKind::full, 1), dtype);
  problem.q.fill([](auto, auto, std::int64_t d) { return d == 0 ? 1.0f : 0.0f; });
  problem.k.fill([](std::int64_t j, auto, std::int64_t d) { return j + d == 0 ? 4.0f : 0.0f; });
  problem.v.fill([](std::int64_t j, auto...) { return j == 0 ? 1.0f : 0.0f; });
  problem.out_dtype = DType::f32;
  return problem;
}

// Slack: a rounded weight (2^-8 for bf16 P) of size .27 to .57, and the report's 1e-5 otherwise.
TEST(BC_045, TheScaleIsTheCallers) {
  for (const DType dtype : kAllDTypes) {
    const double p = error_model(default_kernels(), dtype, DType::f32).weight_rounding;
    const Slack slack{.out = 1e-5 + p, .lse = 1e-5 + p};
    AttentionShape stated = make_shape(1, 1, 64, 64);
    stated.softmax_scale = 0.25;
    expect_everywhere(
        scale_case(stated, dtype),
        [](auto, auto) {
          return RowAnswer{0.7310586, 1.3132617};
        },
        {.chunk_sizes = {1, 2}}, slack);
    expect_everywhere(
        scale_case(make_shape(1, 1, 192, 128), dtype),
        [](auto, auto) {
          return RowAnswer{0.571672, 0.847866};
        },
        {.chunk_sizes = {1, 2}}, slack);
  }
}

TEST(BC_066, RepeatedRunsUnderRandomDelaysHaveTheSameBits) {
  AttentionCase problem = make_random_case(make_shape(4, 1, 32, 32), pack({1, 33, 64, 7}),
                                           test_config(MaskKind::causal, 8), DType::bf16, 66);
  const Attended expected = attend(problem);
  for (std::int64_t seed = 1; seed <= 10; ++seed)
    for (const int world_size : {1, 2}) {
      problem.config.shuffle_arrival = seed;
      const Attended result =
          attend(problem, world_size,
                 {.shuffle_delivery = static_cast<std::uint64_t>(seed), .repeats = 2});
      EXPECT_TRUE(bits_equal(result.out, expected.out));
      EXPECT_TRUE(bits_equal(result.lse, expected.lse));
    }
}

TEST(BC_068, ARowIsTheSameInPrefillTailDecodeAndPack) {
  for (const DType dtype : kAllDTypes) {
    const CpConfig config = test_config(MaskKind::causal, 16);
    const AttentionCase prefill =
        make_random_case(make_shape(2, 1, 32, 32), batch_of_one(64, 64), config, dtype, 68);
    const HostTensor row = attend(prefill).out.rows(std::vector<std::int64_t>{63});
    for (const std::int64_t queries : {16, 1}) {
      AttentionCase tail = prefill;
      tail.batch = batch_of_one(queries, 64);
      std::vector<std::int64_t> rows;
      for (std::int64_t i = 64 - queries; i < 64; ++i) rows.push_back(i);
      tail.q = prefill.q.rows(rows);
      const std::vector<std::int64_t> last{queries - 1};
      EXPECT_TRUE(bits_equal(attend(tail).out.rows(last), row)) << queries;
    }
    AttentionCase batch = make_random_case(
        make_shape(2, 1, 32, 32), pack({64, 64, 64, 64, 64, 64, 64, 64}), config, dtype, 3);
    for (std::int64_t i = 0; i < 64; ++i) {
      batch.q.copy_row(3 * 64 + i, prefill.q, i);
      batch.k.copy_row(3 * 64 + i, prefill.k, i);
      batch.v.copy_row(3 * 64 + i, prefill.v, i);
    }
    const std::vector<std::int64_t> last{3 * 64 + 63};
    EXPECT_TRUE(bits_equal(attend(batch, 2).out.rows(last), row)) << name_of(dtype);
  }
}

}  // namespace
}  // namespace cpattn::testing
