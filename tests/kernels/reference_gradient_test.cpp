#include "kernels/reference/gradient.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/reference/attention.h"
#include "src/base/error.h"
#include "tests/support/host_tensor.h"
#include "tests/support/random.h"

namespace cpattn::testing {
namespace {

constexpr double kUnit = 0x1p-53;

/// A problem whose tensors are doubles.
struct DoubleCase {
  AttentionShape shape;
  SequenceBatch batch;
  MaskKind mask = MaskKind::full;
  std::vector<double> q, k, v, dout, dlse;

  reference::GradientArgs args(int num_threads = 1) const {
    const auto view = [](const std::vector<double>& values, std::int64_t rows, std::int64_t heads,
                         std::int64_t dim) -> reference::Tensor {
      if (values.empty() && rows > 0) return {};
      return contiguous_view(values.data(), std::array<std::int64_t, 3>{rows, heads, dim});
    };
    return {.shape = shape,
            .batch = batch,
            .mask = mask,
            .q = view(q, batch.q_rows, shape.num_heads, shape.head_dim),
            .k = view(k, batch.kv_rows, shape.num_kv_heads, shape.head_dim),
            .v = view(v, batch.kv_rows, shape.num_kv_heads, shape.value_dim),
            .dout = view(dout, batch.q_rows, shape.num_heads, shape.value_dim),
            .dlse = view(dlse, batch.q_rows, shape.num_heads, 1),
            .num_threads = num_threads};
  }

  reference::AttentionResult forward() const {
    const reference::GradientArgs a = args();
    return reference::attention({.shape = shape,
                                 .batch = batch,
                                 .mask = mask,
                                 .q = a.q,
                                 .k = a.k,
                                 .v = a.v,
                                 .rows = {},
                                 .num_threads = 1});
  }

  /// What the gradients are gradients of: dout.out + dlse.lse over all rows that see a key.
  double loss() const {
    const reference::AttentionResult result = forward();
    double sum = 0.0;
    for (std::size_t i = 0; i < result.out.size(); ++i) sum += dout[i] * result.out[i];
    for (std::size_t i = 0; i < dlse.size(); ++i)
      if (std::isfinite(result.lse[i])) sum += dlse[i] * result.lse[i];
    return sum;
  }

  /// A bound on the rounding error of loss(): every term has one of a few dozen roundings per key.
  double loss_rounding() const {
    const reference::AttentionResult result = forward();
    double sum = 0.0;
    for (std::size_t i = 0; i < result.out.size(); ++i) sum += std::abs(dout[i] * result.out[i]);
    for (std::size_t i = 0; i < dlse.size(); ++i)
      if (std::isfinite(result.lse[i])) sum += std::abs(dlse[i]) * (1 + std::abs(result.lse[i]));
    const double steps = static_cast<double>(batch.kv_rows + shape.head_dim) +
                         static_cast<double>(result.out.size() + result.lse.size());
    return steps * kUnit * sum;
  }
};

std::vector<double> normals(std::uint64_t seed, std::int64_t count) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<double>(random_normal(seed, static_cast<std::uint64_t>(i))));
  return values;
}

DoubleCase random_case(const AttentionShape& shape, const SequenceBatch& batch, MaskKind mask,
                       bool has_dlse) {
  const std::int64_t q = batch.q_rows * shape.num_heads;
  const std::int64_t kv = batch.kv_rows * shape.num_kv_heads;
  return {shape,
          batch,
          mask,
          normals(1, q * shape.head_dim),
          normals(2, kv * shape.head_dim),
          normals(3, kv * shape.value_dim),
          normals(4, q * shape.value_dim),
          has_dlse ? normals(5, q) : std::vector<double>{}};
}

/// One head, D = Dv = 1, scale 1.
DoubleCase scalar_case(MaskKind mask, const std::vector<double>& q, const std::vector<double>& k,
                       const std::vector<double>& v) {
  const auto queries = static_cast<std::int64_t>(q.size());
  return {{1, 1, 1, 1, 1.0},
          batch_of_one(queries, static_cast<std::int64_t>(k.size())),
          mask,
          q,
          k,
          v,
          std::vector<double>(q.size(), 1.0),
          {}};
}

std::vector<double> counting(std::size_t count) {
  std::vector<double> values(count);
  std::iota(values.begin(), values.end(), 0.0);
  return values;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], bound) << i;
}

// Q = 0 gives uniform weights; dq = sum_j (1/n) (j - mean) j = (n^2 - 1) / 12.
TEST(ReferenceGradient, UniformWeightsByHand) {
  const auto result = reference::gradient(
      scalar_case(MaskKind::full, std::vector<double>(8, 0.0), counting(8), counting(8)).args());

  expect_near(result.dq.values, std::vector<double>(8, 5.25), 1e-14);
  expect_near(result.dv.values, std::vector<double>(8, 1.0), 1e-14);
  expect_near(result.dk.values, std::vector<double>(8, 0.0), 0.0);
}

TEST(ReferenceGradient, KeysPullTowardsTheirValues) {
  const auto result = reference::gradient(scalar_case(MaskKind::full, std::vector<double>(8, 1.0),
                                                      std::vector<double>(8, 0.0), counting(8))
                                              .args());

  expect_near(result.dk.values, {-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5}, 1e-14);
}

// Six queries over four keys: the first two see nothing. dv_j = sum over rows that see j of 1 over
// the number of keys they see; dk_j the same with (v_j - mean) of that row.
TEST(ReferenceGradient, CausalIsBottomRightAlignedAndEmptyRowsAddNothing) {
  const auto result = reference::gradient(scalar_case(MaskKind::causal, std::vector<double>(6, 1.0),
                                                      std::vector<double>(4, 0.0), counting(4))
                                              .args());

  expect_near(result.dv.values, {25.0 / 12, 13.0 / 12, 7.0 / 12, 0.25}, 1e-15);
  expect_near(result.dk.values, {-23.0 / 24, 0.125, 11.0 / 24, 0.375}, 1e-15);
  expect_near(result.dq.values, std::vector<double>(6, 0.0), 0.0);
}

// Two logits (4, 0) at scale 1/4: p = e / (1 + e); ds = +-p (1 - p) for values (1, 0).
TEST(ReferenceGradient, TheScaleEntersOnce) {
  DoubleCase problem = scalar_case(MaskKind::full, {1.0}, {4.0, 0.0}, {1.0, 0.0});
  problem.shape.softmax_scale = 0.25;
  const double p = 1 / (1 + std::exp(-1.0));

  const auto result = reference::gradient(problem.args());

  expect_near(result.dq.values, {0.25 * p * (1 - p) * 4.0}, 1e-16);
  expect_near(result.dk.values, {0.25 * p * (1 - p), -0.25 * p * (1 - p)}, 1e-16);
  expect_near(result.dv.values, {p, 1 - p}, 1e-16);
}

// The derivative of lse is the weights themselves.
TEST(ReferenceGradient, AnIncomingGradientOfLseReachesQueriesAndKeysOnly) {
  DoubleCase problem = scalar_case(MaskKind::full, {1.0, 2.0}, {0.0, 0.0}, {5.0, 7.0});
  problem.dout = {0.0, 0.0};
  problem.dlse = {1.0, 10.0};

  const auto result = reference::gradient(problem.args());

  expect_near(result.dk.values, {0.5 + 10.0, 0.5 + 10.0}, 1e-14);
  expect_near(result.dq.values, {0.0, 0.0}, 0.0);
  expect_near(result.dv.values, {0.0, 0.0}, 0.0);
}

// ds of a row sums to zero, so keys that are all equal leave nothing of dq.
TEST(ReferenceGradient, EqualKeysGiveNoQueryGradient) {
  DoubleCase problem = random_case({2, 1, 4, 3, 0.5}, batch_of_one(5, 9), MaskKind::full, false);
  for (std::size_t i = 0; i < problem.k.size(); ++i) problem.k[i] = problem.k[i % 4];
  double size = 0.0;
  const auto result = reference::gradient(problem.args());
  for (const reference::Sensitivity& row : result.dq.sensitivities)
    size = std::max(size, row.weight);

  // Nine terms, each off by a few roundings of numbers of the size of its parts.
  for (const double dq : result.dq.values) EXPECT_LT(std::abs(dq), 100 * kUnit * 9 * size);
  EXPECT_GT(size, 0.1);
}

/// The central difference in every element of `input` against `gradient`. Its error is h^2 / 6
/// times a third derivative plus what rounding of the two losses makes of 1 / 2h; halving h leaves
/// a quarter of the former, so the difference of both estimates is three times what is left of it.
void expect_differences(DoubleCase& problem, std::vector<double>& input,
                        const std::vector<double>& gradient) {
  constexpr double kStep = 0x1p-12;
  ASSERT_EQ(input.size(), gradient.size());
  const double rounding = 2 * problem.loss_rounding() / kStep;
  const auto difference = [&](double& x, double step) {
    const double middle = x;
    x = middle + step;
    const double after = problem.loss();
    x = middle - step;
    const double before = problem.loss();
    x = middle;
    return (after - before) / (2 * step);
  };
  double largest = 0.0;
  for (const double x : gradient) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < input.size(); ++i) {
    const double coarse = difference(input[i], kStep);
    const double fine = difference(input[i], kStep / 2);
    const double bound = std::abs(coarse - fine) + 2 * rounding;
    ASSERT_LT(bound, 1e-5 * largest);  // or this would not be a test
    EXPECT_NEAR(gradient[i], fine, bound) << i;
  }
}

TEST(ReferenceGradient, EqualsFiniteDifferences) {
  const std::vector<SequenceBatch> batches{batch_of_one(5, 7), batch_of_one(6, 3),
                                           batch_from_padded({0, 4, 9}, {3, 5}, 9),
                                           batch_from_cu_seqlens({0, 2, 2, 5}, {0, 3, 5, 5}, 5, 5)};
  for (const SequenceBatch& batch : batches)
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
      for (const bool has_dlse : {false, true}) {
        DoubleCase problem = random_case({4, 2, 3, 2, 0.7}, batch, mask, has_dlse);
        const reference::Gradient exact = reference::gradient(problem.args());
        expect_differences(problem, problem.q, exact.dq.values);
        expect_differences(problem, problem.k, exact.dk.values);
        expect_differences(problem, problem.v, exact.dv.values);
      }
}

TEST(ReferenceGradient, PaddingIsNeverReadAndHasNoGradient) {
  const SequenceBatch batch = batch_from_padded({0, 4, 9}, {3, 5}, 9);
  DoubleCase problem = random_case({2, 2, 2, 2, 1.0}, batch, MaskKind::causal, true);
  const reference::Gradient clean = reference::gradient(problem.args());
  for (const auto& [tensor, width] : {std::pair{&problem.q, 4},
                                      {&problem.k, 4},
                                      {&problem.v, 4},
                                      {&problem.dout, 4},
                                      {&problem.dlse, 2}})
    for (int i = 0; i < width; ++i)
      (*tensor)[static_cast<std::size_t>(3 * width + i)] = std::numeric_limits<double>::quiet_NaN();

  const reference::Gradient result = reference::gradient(problem.args());

  EXPECT_EQ(result.dq.values, clean.dq.values);
  EXPECT_EQ(result.dk.values, clean.dk.values);
  EXPECT_EQ(result.dv.values, clean.dv.values);
  for (std::size_t i = 12; i < 16; ++i) EXPECT_EQ(result.dk.values[i], 0.0);
}

TEST(ReferenceGradient, ChosenRowsEqualThoseOfTheWholeOnAnyNumberOfThreads) {
  const DoubleCase problem =
      random_case({4, 2, 5, 3, 0.4}, batch_from_cu_seqlens({0, 4, 11}, {0, 6, 9}, 11, 9),
                  MaskKind::causal, true);
  const reference::Gradient whole = reference::gradient(problem.args());
  const std::vector<std::int64_t> q_rows{10, 0, 5};
  const std::vector<std::int64_t> kv_rows{8, 2};

  const reference::Gradient some = reference::gradient_of_rows(
      problem.args(3), reference::row_statistics(problem.args(2)), q_rows, kv_rows);

  const auto expect_rows = [](const reference::GradientRows& actual,
                              const std::vector<std::int64_t>& rows,
                              const reference::GradientRows& all, std::size_t width) {
    ASSERT_EQ(actual.values.size(), rows.size() * width);
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t j = 0; j < width; ++j)
        EXPECT_EQ(actual.values[i * width + j],
                  all.values[static_cast<std::size_t>(rows[i]) * width + j]);
  };
  expect_rows(some.dq, q_rows, whole.dq, 4 * 5);
  expect_rows(some.dk, kv_rows, whole.dk, 2 * 5);
  expect_rows(some.dv, kv_rows, whole.dv, 2 * 3);
}

TEST(ReferenceGradient, ReadsEveryTypeAndStride) {
  const AttentionShape shape{2, 1, 3, 2, 0.5};
  const SequenceBatch batch = batch_of_one(4, 6);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    HostTensor q(dtype, {4, 2, 3}), k(dtype, {6, 1, 3}), v(dtype, {6, 1, 2}),
        dout(dtype, {4, 2, 2});
    std::uint64_t seed = 0;
    for (HostTensor* tensor : {&q, &k, &v, &dout}) tensor->fill_normal(++seed);
    const auto doubles = [](const HostTensor& tensor) {
      std::vector<double> values;
      for (std::int64_t t = 0; t < tensor.shape()[0]; ++t)
        for (std::int64_t h = 0; h < tensor.shape()[1]; ++h)
          for (std::int64_t d = 0; d < tensor.shape()[2]; ++d)
            values.push_back(static_cast<double>(tensor.at(t, h, d)));
      return values;
    };
    const DoubleCase same{shape,      batch,      MaskKind::causal, doubles(q),
                          doubles(k), doubles(v), doubles(dout),    {}};
    const HostTensor apart = q.with_strides({20, 7, 1});

    const reference::Gradient result = reference::gradient({.shape = shape,
                                                            .batch = batch,
                                                            .mask = MaskKind::causal,
                                                            .q = apart.view(),
                                                            .k = k.view(),
                                                            .v = v.view(),
                                                            .dout = dout.view(),
                                                            .dlse = {},
                                                            .num_threads = 1});

    const reference::Gradient expected = reference::gradient(same.args());
    EXPECT_EQ(result.dq.values, expected.dq.values);
    EXPECT_EQ(result.dk.values, expected.dk.values);
    EXPECT_EQ(result.dv.values, expected.dv.values);
  }
}

// Row 0 sees one key: p = 1. Row 1 sees two with q.k = 0: p = 1/2 each.
TEST(ReferenceGradient, SensitivitiesByHand) {
  const DoubleCase problem = scalar_case(MaskKind::causal, {0.0, 0.0}, {3.0, 4.0}, {2.0, 6.0});

  const reference::Gradient result = reference::gradient(problem.args());

  // Row 1: dp = 2, 6; delta = 4 from the one term 4; ds = -1, 1; lse = ln 2; logits 0, parts 0.
  const reference::Sensitivity& dq = result.dq.sensitivities[1];
  EXPECT_NEAR(dq.weight, 5.0, 1e-14);
  EXPECT_EQ(dq.logit, 0.0);
  EXPECT_NEAR(dq.lse, 5.0 * std::log(2.0), 1e-14);
  EXPECT_NEAR(dq.product, std::sqrt(2.0) * 0.5 * std::hypot(2.0 * 3, 6.0 * 4), 1e-13);
  EXPECT_NEAR(dq.delta, std::sqrt(2.0) * 4 * 0.5 * 7, 1e-13);
  EXPECT_NEAR(dq.underflow, 3.0 * 3 + 4 * 3 + 2, 1e-13);  // |x| (2 + 1) + 1 of two terms
  // Key 0, dv: terms 1 (lse 0) and 1/2 (lse ln 2).
  const reference::Sensitivity& dv = result.dv.sensitivities[0];
  EXPECT_NEAR(dv.weight, std::hypot(1.0, 0.5), 1e-15);
  EXPECT_NEAR(dv.lse, 0.5 * std::log(2.0), 1e-15);
  EXPECT_EQ(dv.product, 0.0);
  EXPECT_EQ(dv.delta, 0.0);
  EXPECT_NEAR(dv.underflow, 2 * (1.0 * 2 + 1), 1e-15);
}

// One query, two equal keys of 3: logits 6, p = 1/2, dp = 2, 6, delta = 4, ds = -1, 1.
TEST(ReferenceGradient, SensitivityToLogitsByHand) {
  const DoubleCase problem = scalar_case(MaskKind::full, {2.0}, {3.0, 3.0}, {2.0, 6.0});

  const reference::Gradient result = reference::gradient(problem.args());

  const double t = std::sqrt(6.0 * 6 + 6 * 6 + 6 * 6);  // itself, those in lse, its one part
  const double moved = std::sqrt(2.0) * 4 * 6;          // delta and its part, with the logits
  EXPECT_NEAR(result.dq.sensitivities[0].logit,
              std::hypot(t * std::sqrt(2.0) * 3, moved * (0.5 * 3 + 0.5 * 3)), 1e-12);
  EXPECT_NEAR(result.dk.sensitivities[0].logit, std::hypot(t * 2, moved * 0.5 * 2), 1e-12);
  EXPECT_NEAR(result.dv.sensitivities[1].logit, t * 0.5, 1e-12);
}

TEST(ReferenceGradient, TensorsThatDoNotFitAreRefused) {
  const DoubleCase problem =
      random_case({4, 2, 5, 3, 0.4}, batch_of_one(4, 6), MaskKind::full, false);
  const auto statistics = reference::row_statistics(problem.args());
  const auto with = [&](std::vector<std::int64_t> q_rows, std::vector<std::int64_t> kv_rows) {
    return reference::gradient_of_rows(problem.args(), statistics, q_rows, kv_rows);
  };
  reference::GradientArgs wrong = problem.args();
  wrong.dout = wrong.q;

  EXPECT_NO_THROW(with({3}, {5}));
  EXPECT_THROW(with({4}, {}), InvalidArgument);
  EXPECT_THROW(with({}, {-1}), InvalidArgument);
  EXPECT_THROW(reference::gradient(wrong), InvalidArgument);
  EXPECT_THROW(reference::gradient_of_rows(problem.args(), {}, {}, {}), InvalidArgument);
}

}  // namespace
}  // namespace cpattn::testing
