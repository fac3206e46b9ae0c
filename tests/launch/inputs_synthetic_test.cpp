#include <cmath>
#include <map>

#include <gtest/gtest.h>

#include "launch/inputs.h"
#include "src/base/digest.h"
#include "src/base/error.h"
#include "tests/launch/inputs_checks.h"

namespace cpattn {
namespace {

// ------------------------------------------------------------------------------------

SyntheticSpec spec_of(Distribution distribution, std::int64_t rows = 40, std::int64_t dim = 24) {
  return {.distribution = distribution,
          .seed = 7,
          .shape = {.num_heads = 6, .num_kv_heads = 2, .head_dim = dim, .value_dim = 17},
          .batch = batch_of_one(rows, rows + 5)};
}

TEST(SyntheticInputs, SlicesEqualTheWhole) {
  for (const auto& distribution : EnumNames<Distribution>::kValues) {
    SCOPED_TRACE(distribution.name);
    const auto source = make_synthetic(spec_of(distribution.value));

    expect_slices_equal_whole(*source);
    expect_bad_reads_refused(*source);
    EXPECT_EQ(source->info().name, "synthetic/" + std::string(distribution.name));
    EXPECT_EQ(source->info().shape.softmax_scale, 1.0 / std::sqrt(24.0));
  }
}

TEST(SyntheticInputs, RowsDoNotDependOnTheBatch) {
  for (const auto& distribution : EnumNames<Distribution>::kValues) {
    SyntheticSpec packed = spec_of(distribution.value, 100);
    packed.batch = batch_from_cu_seqlens({0, 3, 90}, {0, 3, 90}, 90, 95);
    const auto a = make_synthetic(packed);
    const auto b = make_synthetic(spec_of(distribution.value, 40));
    for (const TensorRole role : kRoles) {
      EXPECT_EQ(rows_of(*a, role, DType::f32, 11, 20), rows_of(*b, role, DType::f32, 11, 20));
    }
  }
}

TEST(SyntheticInputs, SeedsAndTensorsDiffer) {
  SyntheticSpec spec = spec_of(Distribution::normal);
  spec.shape = {.num_heads = 2, .num_kv_heads = 2, .head_dim = 16, .value_dim = 16};
  std::map<std::string, int> seen;
  for (const std::uint64_t seed : {0ull, 1ull, 2ull, 1ull << 32, ~0ull}) {
    spec.seed = seed;
    const auto source = make_synthetic(spec);
    for (const TensorRole role : kRoles) {
      // Every (row, head) vector of every tensor is a different one.
      const std::string rows = rows_of(*source, role, DType::f32, 0, 40);
      for (std::size_t at = 0; at < rows.size(); at += 64) ++seen[rows.substr(at, 64)];
    }
  }

  // 40 rows of 2 heads of 64 bytes each; dlse has 4 bytes in place of 64.
  EXPECT_EQ(seen.size(), 5u * (4 * 40 * 2 + 40 * 2 / 16));
}

/// The first elements, fixed: another machine or compiler must make the same bits.
TEST(SyntheticInputs, BitsAreTheSameEverywhere) {
  const std::map<std::string, std::uint64_t> expected{{"normal", 0x28e3e3644eb82877ull},
                                                      {"all_equal", 0xba2743a21d608aa2ull},
                                                      {"outlier_channels", 0x43cbec10219c9d7aull},
                                                      {"large_logits", 0xac5c3b924a6cf1efull},
                                                      {"one_hot", 0x4ab89454ef86cba2ull}};
  for (const auto& distribution : EnumNames<Distribution>::kValues) {
    const auto source = make_synthetic(spec_of(distribution.value));
    Digest digest;
    for (const TensorRole role : kInputRoles) digest.add(rows_of(*source, role, DType::f32, 0, 40));
    Digest gradients;
    for (const TensorRole role : {TensorRole::dout, TensorRole::dlse})
      gradients.add(rows_of(*source, role, DType::f32, 0, 40));

    EXPECT_EQ(digest.value(), expected.at(std::string(distribution.name)))
        << distribution.name << ": 0x" << std::hex << digest.value();
    EXPECT_EQ(gradients.value(), 0x761690cc6067e7a6ull) << "0x" << std::hex << gradients.value();
  }
}

/// Mean, variance, third and fourth moment within six standard errors of the stated distribution
/// (variances of the estimators from the moments of N(0, 1): 1, 2, 15, 96).
TEST(SyntheticInputs, NormalHasItsMoments) {
  SyntheticSpec spec = spec_of(Distribution::normal);
  spec.shape = {.num_heads = 4, .num_kv_heads = 4, .head_dim = 64, .value_dim = 64};
  spec.batch = batch_of_one(4096, 4096);
  const auto source = make_synthetic(spec);
  for (const TensorRole role : {TensorRole::q, TensorRole::k, TensorRole::v, TensorRole::dout}) {
    const std::vector<float> values = floats_of(*source, role);
    std::array<double, 5> moments{};
    double largest = 0.0;
    for (const float x : values) {
      double power = 1.0;
      for (double& moment : moments) moment += power, power *= x;
      largest = std::max(largest, std::abs(static_cast<double>(x)));
    }
    const double n = static_cast<double>(values.size());

    EXPECT_NEAR(moments[1] / n, 0.0, 6 * std::sqrt(1 / n));
    EXPECT_NEAR(moments[2] / n, 1.0, 6 * std::sqrt(2 / n));
    EXPECT_NEAR(moments[3] / n, 0.0, 6 * std::sqrt(15 / n));
    EXPECT_NEAR(moments[4] / n, 3.0 - 0.0307, 6 * std::sqrt(96 / n));
    EXPECT_GT(largest, 4.0);  // a million draws reach beyond 4 (expected about 66 of them)
    EXPECT_LT(largest, 8.3);
  }
}

/// Neighbours in a row, in a column and the same element of q and k are uncorrelated.
TEST(SyntheticInputs, NormalIsIndependent) {
  SyntheticSpec spec = spec_of(Distribution::normal);
  spec.shape = {.num_heads = 2, .num_kv_heads = 2, .head_dim = 128, .value_dim = 128};
  spec.batch = batch_of_one(2048, 2048);
  const auto source = make_synthetic(spec);
  const std::vector<float> q = floats_of(*source, TensorRole::q);
  const std::vector<float> k = floats_of(*source, TensorRole::k);
  const auto correlation = [](const std::vector<float>& a, const std::vector<float>& b,
                              std::size_t lag) {
    double sum = 0.0;
    for (std::size_t i = 0; i + lag < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i + lag];
    return sum / static_cast<double>(a.size());
  };
  const double bound = 6 / std::sqrt(static_cast<double>(q.size()));

  EXPECT_LT(std::abs(correlation(q, k, 0)), bound);
  for (const std::size_t lag : {1u, 2u, 128u, 256u, 512u}) {
    EXPECT_LT(std::abs(correlation(q, q, lag)), bound) << lag;
  }
}

/// Largest and smallest unscaled logit of kv head 0 per query row.
struct LogitRange {
  double smallest = 0.0;
  double largest = 0.0;
};

std::vector<LogitRange> logit_ranges(const InputSource& source) {
  const std::vector<float> q = floats_of(source, TensorRole::q);
  const std::vector<float> k = floats_of(source, TensorRole::k);
  const AttentionShape& shape = source.info().shape;
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  std::vector<LogitRange> ranges;
  for (std::int64_t i = 0; i < source.info().batch.q_rows; ++i) {
    LogitRange range{1e300, -1e300};
    for (std::int64_t j = 0; j < source.info().batch.kv_rows; ++j) {
      const float* const a = q.data() + static_cast<std::size_t>(i * shape.num_heads) * dim;
      const float* const b = k.data() + static_cast<std::size_t>(j * shape.num_kv_heads) * dim;
      double dot = 0.0;
      for (std::size_t c = 0; c < dim; ++c) dot += static_cast<double>(a[c]) * b[c];
      range.smallest = std::min(range.smallest, dot);
      range.largest = std::max(range.largest, dot);
    }
    ranges.push_back(range);
  }
  return ranges;
}

TEST(SyntheticInputs, AllEqualHasOneLogitPerRow) {
  const auto source = make_synthetic(spec_of(Distribution::all_equal));
  bool is_any_nonzero = false;

  for (const LogitRange& range : logit_ranges(*source)) {
    EXPECT_EQ(range.smallest, range.largest);
    is_any_nonzero = is_any_nonzero || range.largest != 0.0;
  }

  EXPECT_TRUE(is_any_nonzero);
  EXPECT_NE(rows_of(*source, TensorRole::v, DType::f32, 0, 1),
            rows_of(*source, TensorRole::v, DType::f32, 1, 1));
}

TEST(SyntheticInputs, LargeLogitsReachTenThousand) {
  const auto source = make_synthetic(spec_of(Distribution::large_logits, 512, 64));
  double largest = 0.0, smallest = 0.0;

  for (const LogitRange& range : logit_ranges(*source)) {
    largest = std::max(largest, range.largest * source->info().shape.softmax_scale);
    smallest = std::min(smallest, range.smallest * source->info().shape.softmax_scale);
  }

  // 265,000 draws of standard deviation 2500: the extremes lie between 4 and 8 of them.
  EXPECT_GT(largest, 1e4);
  EXPECT_LT(largest, 2e4);
  EXPECT_LT(smallest, -1e4);
  EXPECT_GT(smallest, -2e4);
}

TEST(SyntheticInputs, OneHotRowsAreOneHot) {
  const auto source = make_synthetic(spec_of(Distribution::one_hot, 200));
  for (const TensorRole role : {TensorRole::q, TensorRole::k}) {
    const std::vector<float> values = floats_of(*source, role);
    std::map<std::size_t, int> channels;
    for (std::size_t row = 0; row < values.size() / 24; ++row) {
      int num_hot = 0;
      for (std::size_t c = 0; c < 24; ++c) {
        if (values[row * 24 + c] == 0.0f) continue;
        EXPECT_EQ(values[row * 24 + c], 32.0f);
        ++num_hot;
        ++channels[c];
      }
      EXPECT_EQ(num_hot, 1);
    }
    EXPECT_EQ(channels.size(), 24u);
  }
}

TEST(SyntheticInputs, OutlierChannelsStandOut) {
  SyntheticSpec spec = spec_of(Distribution::outlier_channels, 300, 64);
  const auto source = make_synthetic(spec);
  spec.distribution = Distribution::normal;
  const auto plain = make_synthetic(spec);
  for (const TensorRole role : kInputRoles) {
    const auto [rows, heads, dim] = extent_of(source->info(), role);
    const std::vector<float> values = floats_of(*source, role);
    const std::vector<float> base = floats_of(*plain, role);
    for (std::int64_t head = 0; head < heads; ++head) {
      int num_outliers = 0;
      for (std::int64_t c = 0; c < dim; ++c) {
        const auto first = static_cast<std::size_t>(head * dim + c);
        const float factor = std::round(values[first] / base[first]);
        if (factor != 1.0f) {
          ++num_outliers;
          EXPECT_GE(factor, 30.0f);
          EXPECT_LE(factor, 100.0f);
        }
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::size_t at = first + static_cast<std::size_t>(row * heads * dim);
          EXPECT_EQ(values[at], base[at] * factor);
        }
      }
      EXPECT_GE(num_outliers, 1);
      EXPECT_LE(num_outliers, std::max<std::int64_t>(1, dim / 32));
    }
  }
}

TEST(SyntheticInputs, RefusesBadShapes) {
  SyntheticSpec spec = spec_of(Distribution::normal);
  spec.shape.num_kv_heads = 4;
  EXPECT_THROW(make_synthetic(spec), InvalidArgument);
  spec = spec_of(Distribution::normal);
  spec.shape.head_dim = kMaxHeadDim + 1;
  EXPECT_THROW(make_synthetic(spec), InvalidArgument);
  spec = spec_of(Distribution::normal);
  spec.batch.documents[0].q_tokens = 41;
  EXPECT_THROW(make_synthetic(spec), InvalidArgument);
}

}  // namespace
}  // namespace cpattn
