#include "launch/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/reference/attention.h"
#include "launch/error_bound.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AnyConstTensor view(const std::vector<float>& values, std::int64_t heads = 1,
                    std::int64_t channels = 1) {
  const auto rows = static_cast<std::int64_t>(values.size()) / (heads * channels);
  return contiguous_tensor(static_cast<const void*>(values.data()), DType::f32,
                           {rows, heads, channels});
}

std::vector<std::int64_t> all_rows(std::int64_t count) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

/// Compares values of one head and channel, all in one chunk, under one relative bound.
ErrorSummary compare_values(const std::vector<float>& candidate,
                            const std::vector<double>& expected, double bound, double floor = 0.0) {
  const auto rows = all_rows(static_cast<std::int64_t>(expected.size()));
  const std::vector<std::int32_t> chunks(expected.size(), 0);
  const std::vector<double> bounds{bound};
  return compare_error(view(candidate), {.rows = rows,
                                         .values = expected,
                                         .chunk_of_row = chunks,
                                         .num_chunks = 1,
                                         .relative = bounds,
                                         .floor = floor});
}

TEST(CompareBits, CountsEveryDifferenceAndNamesTheFirst) {
  const std::vector<float> expected{1, 2, 3, 4, 5, 6, 7, 8};  // 2 rows, 2 heads, 2 channels
  std::vector<float> candidate = expected;
  candidate[5] = std::nextafter(6.0f, 7.0f);
  candidate[7] = -8.0f;

  const BitComparison result =
      compare_bits(view(candidate, 2, 2), view(expected, 2, 2), all_rows(2));

  EXPECT_EQ(result.compared, 8);
  EXPECT_EQ(result.mismatches, 2);
  ASSERT_TRUE(result.first.has_value());
  EXPECT_EQ(to_string(*result.first),
            "row 1 head 0 channel 1: 6.00000048 (0x40c00001), expected 6 (0x40c00000)");
}

TEST(CompareBits, SeesTheSignOfZeroAndTakesEqualNaNsAsEqual) {
  const std::vector<float> candidate{-0.0f, kNan, 1.0f};
  const std::vector<float> expected{0.0f, kNan, 1.0f};

  const BitComparison result = compare_bits(view(candidate), view(expected), all_rows(3));

  EXPECT_EQ(result.mismatches, 1);
  EXPECT_EQ(result.first->place.row, 0);
}

TEST(CompareBits, ComparesOnlyTheRowsAskedFor) {
  const std::vector<float> candidate{1, 9, 3};
  const std::vector<float> expected{1, 2, 3};
  const std::vector<std::int64_t> rows{0, 2};

  const BitComparison result = compare_bits(view(candidate), view(expected), rows);

  EXPECT_EQ(result.compared, 2);
  EXPECT_EQ(result.mismatches, 0);
}

TEST(CompareBits, RefusesWhatWouldProveNothing) {
  const std::vector<float> values{1, 2};
  const std::vector<float> fewer{1};
  const auto rows = all_rows(2);
  AnyConstTensor half = view(fewer);
  half.dtype = DType::bf16;

  EXPECT_THROW(compare_bits(view(values), view(values), rows), InvalidArgument);
  EXPECT_THROW(compare_bits(view(values), view(fewer), rows), InvalidArgument);
  EXPECT_THROW(compare_bits(half, view(fewer), rows), InvalidArgument);
}

TEST(CompareError, AgreesWithHandValues) {
  // errors 0.3 and 0.4 on a norm of 5
  const ErrorSummary result = compare_values({3.3f, 3.6f}, {3.0, 4.0}, 0.11);

  EXPECT_NEAR(result.rel_l2, 0.1, 1e-7);
  EXPECT_NEAR(result.max_abs, 0.4, 1e-6);
  EXPECT_EQ(result.max_abs_at.row, 1);
  EXPECT_NEAR(result.worst_ratio, 0.1 / 0.11, 1e-6);
  EXPECT_TRUE(result.passes());
  EXPECT_FALSE(compare_values({3.3f, 3.6f}, {3.0, 4.0}, 0.09).passes());
}

TEST(CompareError, ComparisonOfNothingFails) {
  EXPECT_FALSE(compare_values({}, {}, 1.0).passes());
  EXPECT_FALSE(reasons(compare_values({}, {}, 1.0), "out").empty());
}

TEST(CompareError, FindsTheWorstHeadAndChunk) {
  const std::vector<double> expected(8, 1.0);  // 4 rows of 2 heads, two chunks
  std::vector<float> candidate(8, 1.0f);
  candidate[5] = 1.5f;  // row 2, head 1
  const auto rows = all_rows(4);
  const std::vector<std::int32_t> chunks{0, 0, 1, 1};
  const std::vector<double> bounds(4, 1e-3);

  const ErrorSummary result = compare_error(view(candidate, 2), {.rows = rows,
                                                                 .values = expected,
                                                                 .chunk_of_row = chunks,
                                                                 .num_chunks = 2,
                                                                 .relative = bounds});

  EXPECT_EQ(result.worst_head, 1);
  EXPECT_EQ(result.worst_chunk, 1);
  EXPECT_NEAR(result.worst_rel_l2, 0.5 / std::sqrt(2.0), 1e-12);
  EXPECT_FALSE(result.passes());
}

TEST(CompareError, AllowsOneRoundingOfAShortOutputAndNoMore) {
  const std::vector<double> expected{1.003, 2.007, 3.011};
  std::vector<bf16> stored;
  for (const double value : expected) stored.push_back(to_bf16(static_cast<float>(value)));
  const auto rows = all_rows(3);
  const std::vector<std::int32_t> chunks(3, 0);
  const std::vector<double> bounds{1e-6};
  const Expectation expectation{.rows = rows,
                                .values = expected,
                                .chunk_of_row = chunks,
                                .num_chunks = 1,
                                .relative = bounds,
                                .rounded_to = DType::bf16,
                                .rounding_share = kOutputRoundingShare};
  const AnyConstTensor candidate = contiguous_tensor(
      static_cast<const void*>(stored.data()), DType::bf16, std::array<std::int64_t, 3>{3, 1, 1});

  EXPECT_TRUE(compare_error(candidate, expectation).passes());
  stored[2].bits += 2;
  EXPECT_FALSE(compare_error(candidate, expectation).passes());
}

// The special values: a difference with NaN is never larger than a tolerance, so it has to be
// looked for.
TEST(BC_099, SpecialValuesAreAcceptedOnlyWhereTheyAgree) {
  const auto passes = [](float candidate, double expected) {
    const ErrorSummary result = compare_values({1.0f, candidate}, {1.0, expected}, 1e-6, 1.0);
    EXPECT_TRUE(std::isfinite(result.max_abs));
    EXPECT_TRUE(std::isfinite(result.rel_l2));
    EXPECT_EQ(result.passes(), reasons(result, "lse").empty());
    return result.passes();
  };

  EXPECT_FALSE(passes(kNan, 2.0));
  EXPECT_FALSE(passes(kNan, kInf));
  EXPECT_FALSE(passes(2.0f, std::nan("")));
  EXPECT_FALSE(passes(kNan, std::nan("")));
  EXPECT_FALSE(passes(-kInf, 2.0));
  EXPECT_FALSE(passes(2.0f, -static_cast<double>(kInf)));
  EXPECT_TRUE(passes(-kInf, -static_cast<double>(kInf)));
  EXPECT_FALSE(passes(kInf, -static_cast<double>(kInf)));
  EXPECT_TRUE(has_ieee_semantics());
}

// What terms that cancel leave behind is measured by their rounding, not by itself.
TEST(CompareError, AnAbsoluteBoundHoldsWhereNothingIsLeft) {
  const std::vector<float> candidate{3e-6f, -4e-6f};
  const std::vector<double> expected{0.0, 0.0};
  const std::vector<std::int64_t> rows = all_rows(2);
  const std::vector<std::int32_t> chunks{0, 0};
  const std::vector<double> relative{1e-3};
  const auto compare = [&](double bound) {
    const std::vector<double> absolute{bound};
    return compare_error(view(candidate), {.rows = rows,
                                           .values = expected,
                                           .chunk_of_row = chunks,
                                           .num_chunks = 1,
                                           .relative = relative,
                                           .absolute = absolute});
  };

  EXPECT_TRUE(compare(6e-6).passes());
  EXPECT_NEAR(compare(6e-6).worst_rel_l2, 5.0 / 6, 1e-6);
  EXPECT_NEAR(compare(6e-6).worst_allowed, 1.0, 1e-12);
  EXPECT_NEAR(compare(6e-6).rel_l2, 5.0 / 6, 1e-6);
  EXPECT_FALSE(compare(4e-6).passes());
  EXPECT_FALSE(compare(0.0).passes());
}

/// A causal problem of random values, its exact result, and that result rounded to f32: what a
/// right candidate looks like.
struct RandomCase {
  static constexpr std::int64_t kRows = 96, kHeads = 2, kDim = 16, kChunk = 32;
  AttentionShape shape{.num_heads = kHeads,
                       .num_kv_heads = kHeads,
                       .head_dim = kDim,
                       .value_dim = kDim,
                       .softmax_scale = 0.25};
  std::vector<float> q = random(1), k = random(2), v = random(3);
  std::vector<std::int64_t> rows = all_rows(kRows);
  std::vector<std::int32_t> chunks;
  reference::AttentionResult exact = attend(MaskKind::causal, v);

  RandomCase() {
    for (const std::int64_t row : rows) chunks.push_back(static_cast<std::int32_t>(row / kChunk));
  }

  static std::vector<float> random(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(kRows * kHeads * kDim);
    for (float& value : values) value = normal(generator);
    return values;
  }

  reference::AttentionResult attend(MaskKind mask, const std::vector<float>& values) const {
    return reference::attention({.shape = shape,
                                 .batch = batch_of_one(kRows, kRows),
                                 .mask = mask,
                                 .q = view(q, kHeads, kDim),
                                 .k = view(k, kHeads, kDim),
                                 .v = view(values, kHeads, kDim),
                                 .rows = {}});
  }

  static std::vector<float> rounded(const std::vector<double>& values) {
    return {values.begin(), values.end()};
  }

  bool accepts(const std::vector<float>& candidate, const std::vector<double>& values,
               std::int64_t channels, double bound, double floor) const {
    const std::vector<double> bounds(3 * kHeads, bound);
    return compare_error(view(candidate, kHeads, channels), {.rows = rows,
                                                             .values = values,
                                                             .chunk_of_row = chunks,
                                                             .num_chunks = 3,
                                                             .relative = bounds,
                                                             .floor = floor})
        .passes();
  }
  static Arithmetic arithmetic(bool rounds_weights) {
    return {.head_dim = kDim, .run_keys = kChunk, .rounds_weights = rounds_weights};
  }
  /// At the tolerances that parity ships, the widest of them included.
  bool accepts_out(const std::vector<float>& out, bool rounds_weights) const {
    return accepts(out, exact.out, kDim, out_bound(arithmetic(rounds_weights), {kChunk, 1.0}), 0.0);
  }
  bool accepts_lse(const std::vector<float>& lse, bool rounds_weights) const {
    return accepts(lse, exact.lse, 1, lse_bound(arithmetic(rounds_weights), {kChunk, 1.0}), 1.0);
  }
};

TEST(BC_098, SixBadCandidatesAreRejectedAndTheRightOnePasses) {
  const RandomCase problem;
  const std::vector<float> right = RandomCase::rounded(problem.exact.out);
  const std::vector<float> zeros(right.size(), 0.0f);
  std::vector<float> mean(right.size(), 0.0f);
  for (std::size_t i = 0; i < mean.size(); ++i) {
    const std::size_t column = i % (RandomCase::kHeads * RandomCase::kDim);
    for (std::size_t row = 0; row < RandomCase::kRows; ++row) {
      mean[i] += problem.v[row * RandomCase::kHeads * RandomCase::kDim + column] /
                 static_cast<float>(RandomCase::kRows);
    }
  }
  std::vector<float> shifted_v = problem.v;
  std::rotate(shifted_v.begin(), shifted_v.begin() + RandomCase::kHeads * RandomCase::kDim,
              shifted_v.end());
  const std::vector<float> shifted =
      RandomCase::rounded(problem.attend(MaskKind::causal, shifted_v).out);
  const std::vector<float> plain =
      RandomCase::rounded(problem.attend(MaskKind::full, problem.v).out);
  std::vector<float> scaled = right;
  for (float& value : scaled) value *= 1.1f;
  const std::vector<float> right_lse = RandomCase::rounded(problem.exact.lse);
  std::vector<float> base2_lse = right_lse;
  for (float& value : base2_lse) value *= 1.442695f;

  for (const bool rounds_weights : {false, true}) {
    EXPECT_TRUE(problem.accepts_out(right, rounds_weights));
    EXPECT_TRUE(problem.accepts_lse(right_lse, rounds_weights));
    EXPECT_FALSE(problem.accepts_out(mean, rounds_weights)) << "constant mean of v";
    EXPECT_FALSE(problem.accepts_out(zeros, rounds_weights)) << "zeros";
    EXPECT_FALSE(problem.accepts_out(shifted, rounds_weights)) << "v shifted by one row";
    EXPECT_FALSE(problem.accepts_out(plain, rounds_weights)) << "no causal mask";
    EXPECT_FALSE(problem.accepts_out(scaled, rounds_weights)) << "scaled by 1.1";
    EXPECT_FALSE(problem.accepts_lse(base2_lse, rounds_weights)) << "base 2";
  }
}

TEST(BC_104, MagnitudesAreSeenWhereDirectionsAgree) {
  const RandomCase problem;
  const std::vector<float> right = RandomCase::rounded(problem.exact.out);
  std::vector<float> scaled = right;
  float largest = 0.0f;
  for (float& value : scaled) {
    largest = std::max(largest, std::fabs(value));
    value *= 1.05f;
  }
  std::vector<float> spiked = right;
  spiked[777] += 10.0f * largest;

  const auto summary = compare_values(scaled, problem.exact.out, 1e-6);
  EXPECT_NEAR(summary.cosine, 1.0, 1e-9);
  for (const bool rounds_weights : {false, true}) {
    EXPECT_FALSE(problem.accepts_out(scaled, rounds_weights));
    EXPECT_FALSE(problem.accepts_out(spiked, rounds_weights));
  }
}

}  // namespace
}  // namespace cpattn
