// Every kernel table under test against the double-precision reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "src/base/error.h"
#include "tests/support/compare.h"
#include "tests/support/error_bound.h"
#include "tests/support/every_table.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {
namespace {

constexpr std::array kMasks{MaskKind::full, MaskKind::causal};
/// One block per document in these tests: the whole document is one chunk.
constexpr std::int64_t kOneChunk = 1 << 20;

std::string describe(const KernelTable& table, const AttentionCase& problem) {
  const AttentionShape& s = problem.shape;
  return cpattn::detail::concat(
      table.name, " ", name_of(problem.dtype), " -> ", name_of(problem.out_dtype), " ",
      name_of(problem.config.mask), ", ", problem.batch.q_rows, " rows, ", problem.batch.kv_rows,
      " keys, heads ", s.num_heads, ":", s.num_kv_heads, ", dims ", s.head_dim, ", ", s.value_dim);
}

/// Runs the problem on every table and judges each result.
void expect_accurate(const AttentionCase& problem) {
  const Oracle oracle(problem);
  for (const KernelTable* table : tested().tables) {
    const Attended result = run_one_block(*table, problem);
    EXPECT_TRUE(oracle.accepts(result, error_model(*table, problem.dtype, problem.out_dtype)))
        << describe(*table, problem);
  }
}

AttentionCase one_document(const AttentionShape& shape, std::int64_t rows, std::int64_t keys,
                           MaskKind mask, DType dtype, std::uint64_t seed = 1) {
  return make_random_case(shape, batch_of_one(rows, keys), test_config(mask, kOneChunk), dtype,
                          seed);
}

TEST(ForwardAccuracy, RowsAndKeysAroundTheTiles) {
  struct Sizes {
    std::vector<std::int64_t> rows, keys;
  };
  const Sizes of_cpu{{1, 2, 15, 16, 17, 31, 47, 48, 49, 95, 96, 97},
                     {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 500, 513}};
  const Sizes of_cuda{{1, 15, 17, 63, 64, 65, 127, 128, 129}, {1, 8, 15, 17, 63, 64, 65, 129, 300}};
  const bool is_cpu = tested().tables.front()->device == DeviceKind::cpu;
  const Sizes& sizes = is_cpu ? of_cpu : of_cuda;
  const AttentionShape shape = make_shape(2, 1, 16, 8);
  for (const DType dtype : tested().dtypes)
    for (const MaskKind mask : kMasks)
      for (const std::int64_t rows : sizes.rows)
        for (const std::int64_t keys : sizes.keys)
          expect_accurate(one_document(shape, rows, keys, mask, dtype,
                                       static_cast<std::uint64_t>(1000 * rows + keys)));
}

TEST(ForwardAccuracy, EveryHeadDim) {
  constexpr std::array<std::int64_t, 11> kDims{1, 2, 3, 16, 40, 64, 80, 96, 128, 192, 256};
  for (const DType dtype : tested().dtypes)
    for (std::size_t i = 0; i < kDims.size(); ++i)
      for (const std::size_t shift : {0u, 4u, 7u}) {
        const std::int64_t value_dim = kDims[(i + shift) % kDims.size()];
        expect_accurate(one_document(make_shape(1, 1, kDims[i], value_dim), 50, 131,
                                     MaskKind::causal, dtype, i + 1));
      }
}

TEST(ForwardAccuracy, EveryRemainderOfTheDims) {
  // Channels and steps are worked on in groups of at most 16: every remainder, odd ones included.
  for (const DType dtype : tested().dtypes)
    for (std::int64_t dim = 17; dim <= 33; ++dim)
      expect_accurate(one_document(make_shape(1, 1, dim, 50 - dim), 17, 33, MaskKind::full, dtype));
}

TEST(ForwardAccuracy, GroupedHeads) {
  for (const DType dtype : tested().dtypes)
    for (const auto& [heads, kv_heads] :
         {std::pair<std::int64_t, std::int64_t>{9, 3}, {8, 1}, {6, 6}, {12, 2}})
      expect_accurate(
          one_document(make_shape(heads, kv_heads, 64, 40), 33, 70, MaskKind::causal, dtype));
}

TEST(ForwardAccuracy, OutputTypesAreIndependentOfInputTypes) {
  for (const DType dtype : tested().dtypes)
    for (const DType out_dtype : tested().dtypes) {
      AttentionCase problem =
          one_document(make_shape(2, 2, 40, 21), 49, 65, MaskKind::causal, dtype);
      problem.out_dtype = out_dtype;
      expect_accurate(problem);
    }
}

TEST(ForwardAccuracy, MoreQueriesThanKeysLeavesEmptyRows) {
  for (const DType dtype : tested().dtypes)
    for (const std::int64_t keys : {0, 1, 5, 30, 59})
      expect_accurate(one_document(make_shape(2, 1, 16, 16), 60, keys, MaskKind::causal, dtype));
}

TEST(ForwardAccuracy, NoKeysAtAll) {
  for (const DType dtype : tested().dtypes)
    for (const MaskKind mask : kMasks)
      expect_accurate(one_document(make_shape(2, 1, 16, 16), 50, 0, mask, dtype));
}

TEST(ForwardAccuracy, ScaleZeroNegativeTinyAndLarge) {
  for (const DType dtype : tested().dtypes)
    for (const double scale : {0.0, -0.3, 1e-30, 7.0, -1e-42}) {
      AttentionShape shape = make_shape(2, 1, 24, 16);
      shape.softmax_scale = scale;
      expect_accurate(one_document(shape, 40, 130, MaskKind::causal, dtype));
    }
}

TEST(ForwardAccuracy, ScaleZeroAveragesExactly) {
  // 64 keys of equal weight and small integers: every sum is exact, and so is the mean.
  AttentionShape shape = make_shape(1, 1, 8, 4);
  shape.softmax_scale = 0.0;
  for (const DType dtype : tested().dtypes) {
    AttentionCase problem = one_document(shape, 5, 64, MaskKind::full, dtype);
    problem.out_dtype = DType::f32;
    problem.v.fill([](std::int64_t t, auto, std::int64_t d) { return static_cast<float>(t + d); });
    for (const KernelTable* table : tested().tables) {
      const Attended result = run_one_block(*table, problem);
      for (std::int64_t row = 0; row < 5; ++row) {
        EXPECT_EQ(result.out.at(row, 0, 3), 34.5f) << describe(*table, problem);
        EXPECT_EQ(result.lse[static_cast<std::size_t>(row)], static_cast<float>(std::log(64.0)));
      }
    }
  }
}

TEST(ForwardAccuracy, LogitsOfPlusAndMinusTenThousand) {
  // q = 1, D = 1: the logits are the keys, exactly. Keys 0..3 at +-1e4, 4..7 at -+1e4.
  AttentionShape shape{1, 1, 1, 1, 1.0};
  for (const DType dtype : tested().dtypes)
    for (const float sign : {1.0f, -1.0f}) {
      AttentionCase problem = one_document(shape, 20, 8, MaskKind::full, dtype);
      problem.out_dtype = DType::f32;
      problem.q.fill([](auto...) { return 1.0f; });
      problem.k.fill([&](std::int64_t t, auto...) { return t < 4 ? sign * 1e4f : -sign * 1e4f; });
      problem.v.fill([](std::int64_t t, auto...) { return static_cast<float>(t); });
      // bf16 rounds 1e4 to 9984; four equal logits add ln 4, f32 spacing there is 2^-10. The four
      // weights are equal but not 1 (the maximum is rounded), so the mean rounds nine times; where
      // only the numerator's weights are rounded to 16 bits, that shows.
      const double logit = static_cast<double>(problem.k.at(sign > 0 ? 0 : 4, 0, 0));
      for (const KernelTable* table : tested().tables) {
        const Attended result = run_one_block(*table, problem);
        const ErrorModel model = error_model(*table, dtype, DType::f32);
        const double rounding = model.weight_rounding - model.lse_weight_rounding;
        EXPECT_NEAR(result.out.at(19, 0, 0), sign > 0 ? 1.5 : 5.5,
                    5.5 * (9 * kUnitRoundoff + rounding))
            << describe(*table, problem);
        EXPECT_NEAR(result.lse[19], logit + std::log(4.0), 3 * 0x1p-10)
            << describe(*table, problem);
      }
    }
}

TEST(ForwardAccuracy, RandomLogitsOfTenThousand) {
  for (const DType dtype : tested().dtypes) {
    AttentionCase problem =
        one_document(make_shape(2, 1, 16, 16), 49, 200, MaskKind::causal, dtype);
    problem.q.fill_normal(5, 100.0f);
    problem.k.fill_normal(6, 100.0f);
    expect_accurate(problem);
  }
}

TEST(ForwardAccuracy, WeightsThatUnderflowAreZeroNotNoise) {
  // Key 0 is ahead of the others by ln of more than any f32: their values, huge, must not show.
  for (const DType dtype : tested().dtypes) {
    AttentionCase problem =
        one_document(AttentionShape{1, 1, 1, 2, 1.0}, 20, 300, MaskKind::full, dtype);
    const float huge = dtype == DType::f16 ? 6e4f : 1e30f;
    problem.q.fill([](auto...) { return 1.0f; });
    problem.k.fill([](std::int64_t t, auto...) { return t == 0 ? 200.0f : 0.0f; });
    problem.v.fill([&](std::int64_t t, auto...) { return t == 0 ? 3.0f : huge; });
    for (const KernelTable* table : tested().tables) {
      const Attended result = run_one_block(*table, problem);
      EXPECT_EQ(result.out.at(7, 0, 1), 3.0f) << table->name;
      EXPECT_EQ(result.lse[7], 200.0f) << table->name;
    }
  }
}

TEST(ForwardAccuracy, StatedAccuracyOnNormalInputs) {
  // What docs/numerics.md promises: f32 within 1e-6 of the reference in relative L2; 16-bit inputs
  // within 1.25 times one rounding of the result, plus the rounding of P to bf16 where that is
  // done: independent roundings of the weights, uniform within half a spacing, so 2^-8 / sqrt(3) at
  // most per weight, and no more than that after the mean.
  for (const DType dtype : tested().dtypes) {
    const AttentionCase problem =
        one_document(make_shape(2, 1, 64, 64), 64, 512, MaskKind::full, dtype);
    const Oracle oracle(problem);
    HostTensor rounded(dtype, problem.q.shape());
    std::size_t i = 0;
    rounded.fill([&](auto...) { return static_cast<float>(oracle.expected().out[i++]); });
    const double one_rounding = relative_l2(problem, {rounded, {}}, oracle.expected());
    for (const KernelTable* table : tested().tables) {
      const double p = error_model(*table, dtype, dtype).weight_rounding / std::sqrt(3.0);
      const double bound = dtype == DType::f32 ? 1e-6 : std::hypot(1.25 * one_rounding, p);
      EXPECT_LE(relative_l2(problem, run_one_block(*table, problem), oracle.expected()), bound)
          << describe(*table, problem);
    }
  }
}

}  // namespace
}  // namespace cpattn::testing
