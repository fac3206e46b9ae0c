// What the bits of a row may depend on: the row, the keys it sees and the program. Nothing else.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/every_table.h"
#include "tests/support/far_tensor.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {
namespace {

constexpr std::int64_t kOneChunk = 1 << 20;

/// 100 rows over 300 keys, causal: three row tiles, three key tiles, grouped heads, odd dims.
AttentionCase usual_case(DType dtype, MaskKind mask = MaskKind::causal) {
  return make_random_case(make_shape(4, 2, 19, 13), batch_of_one(100, 300),
                          test_config(mask, kOneChunk), dtype, 11);
}

::testing::AssertionResult same(const Attended& actual, const Attended& expected) {
  auto result = bits_equal(actual.out, expected.out);
  if (!result) return result << " (out)";
  return bits_equal(actual.lse, expected.lse);
}

/// The lse of one row, all heads.
std::vector<float> lse_row(const Attended& result, std::int64_t row) {
  const auto heads = static_cast<std::size_t>(result.out.shape()[1]);
  const auto first = result.lse.begin() + static_cast<std::ptrdiff_t>(heads) * row;
  return {first, first + static_cast<std::ptrdiff_t>(heads)};
}

::testing::AssertionResult same_row(const Attended& actual, std::int64_t row,
                                    const Attended& expected, std::int64_t expected_row) {
  auto result =
      bits_equal(actual.out.rows(std::array{row}), expected.out.rows(std::array{expected_row}));
  if (!result) return result << " (out, row " << expected_row << ")";
  return bits_equal(lse_row(actual, row), lse_row(expected, expected_row));
}

TEST(ForwardBits, RepeatedRuns) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    EXPECT_TRUE(same(run_one_block(table, problem), run_one_block(table, problem)));
  });
}

TEST(ForwardBits, ThreadCount) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended one = run_one_block(table, problem, {.num_threads = 1});
    for (const int threads : {2, 3})
      EXPECT_TRUE(same(run_one_block(table, problem, {.num_threads = threads}), one)) << threads;
  });
}

TEST(ForwardBits, LengthOfTheQueryChunks) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended whole = run_one_block(table, problem);
    // Around the row tiles of each backend; a program is a whole tile's work to the second one.
    const auto lengths = table.device == DeviceKind::cpu
                             ? std::vector<std::int64_t>{1, 5, 16, 47, 48, 96}
                             : std::vector<std::int64_t>{17, 64, 96};
    for (const std::int64_t rows : lengths)
      EXPECT_TRUE(same(run_one_block(table, problem, {.rows_per_program = rows}), whole)) << rows;
  });
}

TEST(ForwardBits, ARowAloneEqualsTheRowInABlock) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended whole = run_one_block(table, problem);
    for (const std::int64_t row : {0, 1, 15, 16, 47, 48, 63, 99}) {
      // Row r of 100 over 300 keys sees 201 + r keys: alone, the last query of so many keys.
      AttentionCase alone = problem;
      alone.batch = batch_of_one(1, 201 + row);
      std::vector<std::int64_t> seen(static_cast<std::size_t>(201 + row));
      for (std::size_t j = 0; j < seen.size(); ++j) seen[j] = static_cast<std::int64_t>(j);
      alone.q = problem.q.rows(std::array{row});
      alone.k = problem.k.rows(seen);
      alone.v = problem.v.rows(seen);
      EXPECT_TRUE(same_row(run_one_block(table, alone), 0, whole, row));
      alone.config.mask = MaskKind::full;
      EXPECT_TRUE(same_row(run_one_block(table, alone), 0, whole, row)) << "full";
    }
  });
}

TEST(ForwardBits, OtherHeads) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended whole = run_one_block(table, problem);
    // Head 3 reads kv head 1: alone, with its kv head.
    AttentionCase alone = make_case(problem.shape, problem.batch, problem.config, dtype);
    alone.shape.num_heads = alone.shape.num_kv_heads = 1;
    alone = make_case(alone.shape, problem.batch, problem.config, dtype);
    alone.q.fill([&](auto t, auto, auto d) { return problem.q.at(t, 3, d); });
    alone.k.fill([&](auto t, auto, auto d) { return problem.k.at(t, 1, d); });
    alone.v.fill([&](auto t, auto, auto d) { return problem.v.at(t, 1, d); });
    const Attended result = run_one_block(table, alone);
    for (std::int64_t row = 0; row < 100; ++row) {
      for (std::int64_t d = 0; d < 13; ++d)
        ASSERT_EQ(result.out.bits_at(row, 0, d), whole.out.bits_at(row, 3, d));
      ASSERT_EQ(result.lse[static_cast<std::size_t>(row)],
                whole.lse[static_cast<std::size_t>(4 * row + 3)]);
    }
  });
}

TEST(ForwardBits, EqualNumericsGiveEqualBitsOnEveryInstructionSet) {
  int compared = 0;
  for (const DType dtype : tested().dtypes)
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
      for (const double scale : {0.3, -0.3, 0.0}) {
        AttentionCase problem = usual_case(dtype, mask);
        problem.shape.softmax_scale = scale;
        std::map<std::string_view, std::pair<const KernelTable*, Attended>> first;
        for (const KernelTable* table : tested().tables) {
          Attended result = run_one_block(*table, problem);
          const auto [place, is_new] =
              first.try_emplace(table->numerics(dtype), table, std::move(result));
          if (is_new) continue;
          ++compared;
          EXPECT_TRUE(same(result, place->second.second))
              << table->name << " against " << place->second.first->name << ", " << name_of(dtype);
        }
      }
  if (tested().tables.size() > 1) {
    EXPECT_GT(compared, 0);
  }
}

TEST(ForwardBits, StridesAndPoisonedPadding) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended contiguous = run_one_block(table, problem);
    // Odd gaps between heads and rows, all NaN; the rows of out lie in a wider buffer too.
    const HostTensor q = problem.q.with_strides({4 * 23 + 5, 23, 1});
    const HostTensor k = problem.k.with_strides({2 * 19 + 1, 19, 1});
    const HostTensor v = problem.v.with_strides({15, 100 * 300, 1});  // heads outermost
    Attended result = unset_result(problem);
    HostTensor out(dtype, {100, 4, 13}, {4 * 17 + 3, 17, 1});
    std::vector<float> lse(100 * 7, kNan);
    run_one_block(table, problem,
                  {q.view(), k.view(), v.view(), out.view(), {lse.data(), {100, 4}, {7, 1}}});
    result.out = out.with_strides({4 * 13, 13, 1});
    for (std::size_t row = 0; row < 100; ++row)
      for (std::size_t h = 0; h < 7; ++h) {
        if (h < 4) {
          result.lse[row * 4 + h] = lse[row * 7 + h];
        } else {
          EXPECT_TRUE(std::isnan(lse[row * 7 + h])) << "a gap of lse was written";
        }
      }

    EXPECT_TRUE(same(result, contiguous));
    // Between and behind the heads of out nothing may be written either.
    AnyTensor gaps = out.view();
    for (std::int64_t row = 0; row < 99; ++row)
      for (std::int64_t gap = 13; gap < 17; ++gap)
        EXPECT_TRUE(std::isnan(load_as_float(gaps.row(row, 2), dtype, gap)));
  });
}

// The last row begins past 2^32 elements; a kernel that narrows an offset uses other memory.
TEST(BC_077, RowsPast32BitsOfElements) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem =
        make_random_case(make_shape(2, 1, 16, 16), batch_of_one(3, 3),
                         test_config(MaskKind::causal, kOneChunk), dtype, 77);
    const Attended near = run_one_block(table, problem);
    const FarTensor q(problem.q.view()), k(problem.k.view()), v(problem.v.view());
    const FarTensor out(problem.out_dtype, {3, 2, 16}), lse(DType::f32, {3, 2, 1});
    run_one_block(table, problem,
                  {q.view(),
                   k.view(),
                   v.view(),
                   out.view(),
                   {static_cast<float*>(lse.view().data), {3, 2}, {FarTensor::kRowStride, 1}}});
    Attended result = unset_result(problem);
    out.copy_to(result.out.view());
    lse.copy_to(contiguous_tensor(static_cast<void*>(result.lse.data()), DType::f32, {3, 2, 1}));
    EXPECT_TRUE(same(result, near));
  });
}

TEST(BC_025, ViewsIntoAFusedBuffer) {
  constexpr std::int64_t kTokens = 8, kHeads = 2, kDim = 4;
  for_each_table([](const KernelTable& table, DType dtype) {
    HostTensor fused(dtype, {kTokens, 3 * kHeads, kDim});
    fused.fill_normal(25);
    const auto view_of = [&](std::int64_t which) {
      AnyConstTensor view = std::as_const(fused).view();
      view.data = view.row(0, which * kHeads);
      view.shape[1] = kHeads;
      return view;
    };
    const auto reversed = [](AnyConstTensor view) {
      view.data = view.row(0, kHeads - 1);
      view.strides[1] = -view.strides[1];
      return view;
    };
    AttentionCase copy =
        make_case(make_shape(kHeads, kHeads, kDim, kDim), batch_of_one(kTokens, kTokens),
                  test_config(MaskKind::causal, kOneChunk), dtype);
    for (const bool is_reversed : {false, true}) {
      const auto head = [&](std::int64_t h) { return is_reversed ? kHeads - 1 - h : h; };
      copy.q.fill([&](auto t, auto h, auto d) { return fused.at(t, head(h), d); });
      copy.k.fill([&](auto t, auto h, auto d) { return fused.at(t, kHeads + head(h), d); });
      copy.v.fill([&](auto t, auto h, auto d) { return fused.at(t, 2 * kHeads + head(h), d); });
      Attended result = unset_result(copy);
      AnyConstTensor q = view_of(0), k = view_of(1), v = view_of(2);
      if (is_reversed) q = reversed(q), k = reversed(k), v = reversed(v);
      run_one_block(table, copy, {q, k, v, result.out.view(), lse_view(result)});

      EXPECT_TRUE(same(result, run_one_block(table, copy))) << (is_reversed ? "reversed" : "");
    }
  });
}

TEST(ForwardBits, ANanStaysInItsQueryRow) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended clean = run_one_block(table, problem);
    for (const float poison : {kNan, kInf, -kInf}) {
      AttentionCase poisoned = problem;
      poisoned.q.set(20, 1, 3, poison);
      const Attended result = run_one_block(table, poisoned);
      for (std::int64_t row = 0; row < 100; ++row) {
        if (row == 20) continue;
        EXPECT_TRUE(same_row(result, row, clean, row));
      }
      // Infinity times keys of both signs: the row has no meaning, and says so.
      EXPECT_TRUE(std::isnan(result.out.at(20, 1, 0))) << poison;
      EXPECT_TRUE(std::isnan(lse_row(result, 20)[1])) << poison;
      EXPECT_EQ(lse_row(result, 20)[0], lse_row(clean, 20)[0]);
    }
  });
}

TEST(ForwardBits, ANanInAQueryIsNotLostToAScaleOfZero) {
  for_each_table([](const KernelTable& table, DType dtype) {
    AttentionCase problem = usual_case(dtype);
    problem.shape.softmax_scale = 0.0;
    const Attended clean = run_one_block(table, problem);
    problem.q.set(57, 1, 4, kNan);
    problem.q.set(58, 1, 5, kInf);
    const Attended result = run_one_block(table, problem);
    for (const std::int64_t row : {57, 58}) {
      EXPECT_TRUE(std::isnan(result.out.at(row, 1, 0)));
      EXPECT_TRUE(std::isnan(lse_row(result, row)[1]));
    }
    for (const std::int64_t row : {56, 59}) EXPECT_TRUE(same_row(result, row, clean, row));
  });
}

TEST(ForwardBits, HiddenKeysAndValuesAreNotUsedAsNumbers) {
  // Row r sees the keys up to 200 + r. Whatever the later ones hold, the row does not change.
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = usual_case(dtype);
    const Attended clean = run_one_block(table, problem);
    for (const float poison : {kNan, kInf, -kInf, 6e4f})
      for (const std::int64_t key : {210, 211, 255, 256, 299}) {
        AttentionCase poisoned = problem;
        poisoned.k.set(key, 0, 2, poison);
        poisoned.v.set(key, 0, 5, poison);
        const Attended result = run_one_block(table, poisoned);
        for (std::int64_t row = 0; row < key - 200; ++row)
          ASSERT_TRUE(same_row(result, row, clean, row)) << poison << " in key " << key;
        EXPECT_FALSE(same_row(result, key - 200, clean, key - 200)) << poison;
      }
  });
}

TEST(ForwardBits, InfiniteInputsComeToAnEnd) {
  for_each_table([](const KernelTable& table, DType dtype) {
    for (const int which : {0, 1, 2}) {
      AttentionCase problem = usual_case(dtype, MaskKind::full);
      HostTensor& tensor = which == 0 ? problem.q : which == 1 ? problem.k : problem.v;
      tensor.fill([](auto...) { return kInf; });
      const Attended result = run_one_block(table, problem);
      EXPECT_FALSE(std::isfinite(result.out.at(50, 0, 0))) << which;
    }
  });
}

TEST(ForwardBits, ZerosOfTheOutputArePositive) {
  for_each_table([](const KernelTable& table, DType dtype) {
    AttentionCase problem = usual_case(dtype);
    problem.v.fill([](auto...) { return -0.0f; });
    const Attended result = run_one_block(table, problem);
    EXPECT_EQ(result.out.bits_at(0, 0, 0), 0u);
    EXPECT_EQ(result.out.bits_at(99, 3, 12), 0u);
  });
}

}  // namespace
}  // namespace cpattn::testing
