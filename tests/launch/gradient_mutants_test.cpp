// Gradients that are wrong in the ways gradients have been wrong, against the bounds that parity
// ships.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/reference/attention.h"
#include "kernels/reference/gradient.h"
#include "launch/compare.h"
#include "launch/error_bound.h"

namespace cpattn {
namespace {

constexpr std::int64_t kRows = 96, kDim = 16, kChunk = 32;

std::vector<float> random(unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kRows * kDim);
  for (float& value : values) value = normal(generator);
  return values;
}

/// A head of 96 rows and keys without a mask.
struct GradientCase {
  AttentionShape shape{.head_dim = kDim, .value_dim = kDim, .softmax_scale = 0.25};
  std::vector<float> q = random(1), k = random(2), v = random(3);
  std::vector<float> dout;
  reference::Gradient exact;

  explicit GradientCase(std::vector<float> upstream) : dout(std::move(upstream)) {
    exact = reference::gradient(args());
  }

  static AnyConstTensor view(const std::vector<float>& values) {
    return contiguous_tensor(static_cast<const void*>(values.data()), DType::f32, {kRows, 1, kDim});
  }
  reference::GradientArgs args() const {
    return {.shape = shape,
            .batch = batch_of_one(kRows, kRows),
            .q = view(q),
            .k = view(k),
            .v = view(v),
            .dout = view(dout),
            .dlse = {}};
  }

  /// At the shipped tolerances.
  bool accepts(const reference::GradientRows& expected, SummedOver summed_over,
               const std::vector<double>& candidate, bool rounds_weights) const {
    const Arithmetic arithmetic{.head_dim = kDim,
                                .value_dim = kDim,
                                .run_keys = kChunk,
                                .run_rows = kChunk,
                                .rounds_weights = rounds_weights};
    constexpr std::size_t kChunks = kRows / kChunk;
    std::vector<std::int64_t> rows(kRows);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<std::int32_t> chunk_of_row;
    for (std::size_t row = 0; row < kRows; ++row) {
      chunk_of_row.push_back(static_cast<std::int32_t>(row / kChunk));
    }
    const std::vector<double> absolute =
        gradient_bounds(arithmetic, summed_over, expected, chunk_of_row, kChunks, 1);
    const std::vector<double> relative(kChunks, kGradientBound);
    const std::vector<float> stored(candidate.begin(), candidate.end());
    return compare_error(view(stored), {.rows = rows,
                                        .values = expected.values,
                                        .chunk_of_row = chunk_of_row,
                                        .num_chunks = static_cast<std::int32_t>(kChunks),
                                        .relative = relative,
                                        .absolute = absolute})
        .passes();
  }
  bool accepts_dq(const std::vector<double>& candidate, bool rounds_weights = false) const {
    return accepts(exact.dq, SummedOver::keys, candidate, rounds_weights);
  }
  bool accepts_dk(const std::vector<double>& candidate, bool rounds_weights = false) const {
    return accepts(exact.dk, SummedOver::rows, candidate, rounds_weights);
  }
  bool accepts_dv(const std::vector<double>& candidate, bool rounds_weights = false) const {
    return accepts(exact.dv, SummedOver::rows, candidate, rounds_weights);
  }

  /// dq = scale ds K' where row j of K' is row `order[j]` of K.
  std::vector<double> dq_with_keys(const std::vector<std::size_t>& order) const {
    const reference::RowStatistics statistics = reference::row_statistics(args());
    std::vector<double> dq(kRows * kDim);
    const auto product = [](const std::vector<float>& a, std::size_t i, const std::vector<float>& b,
                            std::size_t j) {
      double sum = 0.0;
      for (std::size_t d = 0; d < kDim; ++d)
        sum += static_cast<double>(a[i * kDim + d]) * b[j * kDim + d];
      return sum;
    };
    for (std::size_t i = 0; i < kRows; ++i)
      for (std::size_t j = 0; j < kRows; ++j) {
        const double p = std::exp(shape.softmax_scale * product(q, i, k, j) - statistics.lse[i]);
        const double ds = p * (product(dout, i, v, j) - statistics.delta[i]);
        for (std::size_t d = 0; d < kDim; ++d)
          dq[i * kDim + d] += shape.softmax_scale * ds * k[order[j] * kDim + d];
      }
    return dq;
  }

  /// sum_j p_ij dout_j: P where P^T belongs.
  std::vector<double> dv_without_transposing() const {
    return reference::attention({.shape = shape,
                                 .batch = batch_of_one(kRows, kRows),
                                 .q = view(q),
                                 .k = view(k),
                                 .v = view(dout),
                                 .rows = {}})
        .out;
  }
};

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

TEST(BC_102, RandomUpstreamGradientsTellMutantsFromTheRightAnswer) {
  const GradientCase problem(random(4));
  std::vector<std::size_t> order(kRows);
  std::iota(order.begin(), order.end(), 0u);
  for (const bool rounds_weights : {false, true}) {
    EXPECT_TRUE(problem.accepts_dq(problem.dq_with_keys(order), rounds_weights));
    EXPECT_TRUE(problem.accepts_dv(problem.exact.dv.values, rounds_weights));
  }
  std::swap(order[10], order[70]);  // column sums of K stay what they are
  for (const bool rounds_weights : {false, true}) {
    EXPECT_FALSE(problem.accepts_dq(problem.dq_with_keys(order), rounds_weights));
    EXPECT_FALSE(problem.accepts_dv(problem.dv_without_transposing(), rounds_weights));
  }
}

TEST(BC_098, ScaledGradientsAreRejected) {
  const GradientCase problem(random(4));
  for (const bool rounds_weights : {false, true}) {
    EXPECT_TRUE(problem.accepts_dk(problem.exact.dk.values, rounds_weights));
    EXPECT_FALSE(problem.accepts_dk(scaled(problem.exact.dk.values, 1.1), rounds_weights));
    EXPECT_FALSE(problem.accepts_dk(std::vector<double>(kRows * kDim), rounds_weights));
  }
}

TEST(BC_099, OneNaNInAGradientIsAFailure) {
  const GradientCase problem(random(4));
  std::vector<double> dq = problem.exact.dq.values;
  dq[777] = std::nan("");

  EXPECT_FALSE(problem.accepts_dq(dq));
  EXPECT_FALSE(problem.accepts_dq(dq, true));
}

TEST(BC_104, GradientsOffByAFactorOrASpikeAreRejected) {
  const GradientCase problem(random(4));
  for (const bool rounds_weights : {false, true}) {
    EXPECT_FALSE(problem.accepts_dq(scaled(problem.exact.dq.values, 1.05), rounds_weights));
    EXPECT_FALSE(problem.accepts_dk(scaled(problem.exact.dk.values, 1.05), rounds_weights));
    EXPECT_FALSE(problem.accepts_dv(scaled(problem.exact.dv.values, 1.05), rounds_weights));
    std::vector<double> spiked = problem.exact.dk.values;
    spiked[500] += 10 * *std::max_element(spiked.begin(), spiked.end());
    EXPECT_FALSE(problem.accepts_dk(spiked, rounds_weights));
  }
}

}  // namespace
}  // namespace cpattn
