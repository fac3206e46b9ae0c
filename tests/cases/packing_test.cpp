// K03 packed documents and padding, K04 zero-length documents and cumulative lengths.
#include <algorithm>
#include <vector>

#include "tests/cases/closed_form.h"

namespace cpattn::testing {
namespace {

TEST(BC_010, SevenTokensInAPaddedSlot) {
  for (const std::int64_t slot : {8, 10, 12})
    for (const float pad : {200.0f, kNan})
      for (const DType dtype : kAllDTypes) {
        AttentionCase problem =
            u_recipe(batch_from_padded({0, slot}, {7}, slot), MaskKind::full, dtype);
        for (std::int64_t d = 0; d < 8; ++d) {
          for (std::int64_t j = 0; j < 7; ++j) problem.v.set(j, 0, d, j < 4 ? 1.0f : 2.0f);
          for (std::int64_t j = 7; j < slot; ++j) {
            problem.v.set(j, 0, d, pad);
            problem.k.set(j, 0, d, std::isnan(pad) ? kNan : 0.0f);
          }
        }
        expect_everywhere(problem, [](std::int64_t row, auto) {
          return row < 7 ? RowAnswer{10.0 / 7, std::log(7.0)} : RowAnswer{};
        });
      }
}

TEST(BC_012, PaddingBetweenDocumentsIsNeverANumber) {
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem =
        u_recipe(batch_from_padded({0, 4, 12}, {3, 5}, 12), MaskKind::causal, dtype, 2, 1);
    ASSERT_TRUE(std::isnan(problem.v.at(3, 0, 0)) && std::isnan(problem.q.at(10, 1, 0)));
    expect_everywhere(problem, [](std::int64_t row, auto) {
      if (row < 3) return first_keys(row + 1);
      if (row >= 4 && row < 9) return first_keys(row - 3);
      return RowAnswer{};
    });
  }
}

// The forward part: padding stays out of the results when slots are twice the documents.
TEST(BC_013, PaddingAfterTheRing) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem =
        u_recipe(batch_from_padded({0, 8, 16}, {3, 5}, 16), MaskKind::full, dtype);
    expect_everywhere(problem, [](std::int64_t row, auto) {
      if (row < 3) return first_keys(3);
      if (row >= 8 && row < 13) return first_keys(5);
      return RowAnswer{};
    });
  }
}

// A key mask is not an input; its documents are. Rows [0, 2, 2, 0] and [1, 1, 1, 1] are documents
// of 2 and 4 tokens, and the lengths are counts, never sums of mask values.
TEST(BC_014, DocumentsOfAKeyMask) {
  const SequenceBatch batch{{{1, 2, 1, 2}, {4, 4, 4, 4}}, 8, 8};
  for (const DType dtype : kAllDTypes)
    expect_everywhere(u_recipe(batch, MaskKind::causal, dtype), [](std::int64_t row, auto) {
      if (row == 1 || row == 2) return first_keys(row);
      if (row >= 4) return first_keys(row - 3);
      return RowAnswer{};
    });
}

TEST(BC_016, DecodeTogetherWithEmptyDocuments) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(pack({1, 0, 1}, {3, 0, 5}), MaskKind::causal, dtype, 9, 3);
    for (std::int64_t j = 0; j < 8; ++j)  // the index in the pack
      for (std::int64_t h = 0; h < 3; ++h)
        for (std::int64_t d = 0; d < 8; ++d) problem.v.set(j, h, d, static_cast<float>(j));
    expect_everywhere(problem, [](std::int64_t row, auto) {
      return row == 0 ? RowAnswer{1.0, std::log(3.0)} : RowAnswer{5.0, std::log(5.0)};
    });
  }
}

// Outputs start as NaN in every run here, so a row that nobody writes shows.
TEST(BC_017, DocumentsWithKeysButNoQueries) {
  const SequenceBatch batch = batch_from_cu_seqlens({0, 0, 3, 3, 5}, {0, 2, 5, 5, 9}, 5, 9);
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch, MaskKind::full, dtype);
    for (std::int64_t j = 0; j < 9; ++j)
      for (std::int64_t d = 0; d < 8; ++d) problem.v.set(j, 0, d, static_cast<float>(j));
    expect_everywhere(problem, [](std::int64_t row, auto) {
      return row < 3 ? RowAnswer{3.0, std::log(3.0)} : RowAnswer{6.5, std::log(4.0)};
    });
  }
}

// Rows past the last cumulative length belong to no rank: nobody reads or writes them.
TEST(BC_019, RowsPastTheLastDocument) {
  const SequenceBatch batch = batch_from_cu_seqlens({0, 3, 7}, {0, 3, 7}, 10, 10);
  for (const int world_size : {1, 2, 4}) {
    AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), batch,
                                             test_config(MaskKind::causal, 1), DType::f32, 1);
    ASSERT_TRUE(std::isnan(problem.k.at(8, 0, 0)));
    std::int64_t owned = 0;
    for (const Shard& shard : make_sharding(batch, problem.config, world_size).shards) {
      for (const std::int64_t row : global_rows(shard.q)) EXPECT_LT(row, 7);
      owned += shard.q_rows;
    }
    EXPECT_EQ(owned, 7);
    const Attended result = attend(problem, world_size);
    double sum = 0.0;
    for (std::int64_t row = 0; row < 10; ++row) sum += result.out.at(row, 1, 7);
    EXPECT_TRUE(std::isfinite(sum));
    EXPECT_EQ(result.out.at(8, 0, 0), 0.0f);
  }
}

// Sizes follow the longest document (8), not the end of the pack (12).
TEST(BC_020, TheLongestDocumentIsADifferenceOfNeighbours) {
  const auto longest_chunk = [](const std::vector<std::int64_t>& cu) {
    CpConfig config;
    const Problem problem{.shape = make_shape(1, 1, 8, 8),
                          .batch = batch_from_cu_seqlens(cu, cu, 12, 12)};
    return Plan(problem, config, default_kernels(), 0, 2).kernel_problem().max_chunk_rows;
  };
  EXPECT_EQ(longest_chunk({0, 3, 4, 12}), 8);
  EXPECT_EQ(longest_chunk({0, 12}), 12);
}

}  // namespace
}  // namespace cpattn::testing
