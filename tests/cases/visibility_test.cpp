// K01 causal alignment, K02 sharding and reassembly, K07 rows without keys.
#include <string>
#include <vector>

#include "cp/config.h"
#include "tests/cases/closed_form.h"

namespace cpattn::testing {
namespace {

TEST(BC_001, BottomRightAlignment) {
  for (const DType dtype : kAllDTypes)
    expect_everywhere(u_recipe(batch_of_one(4, 6), MaskKind::causal, dtype),
                      [](std::int64_t i, auto) { return first_keys(i + 3); });
}

// Ownership of token t by rank t mod P is not offered and refused by name. The answer must not
// depend on ownership, so the same three queries over ten keys run under what is offered, single
// tokens dealt to four ranks.
TEST(BC_003, BoundsOfEachQueryAcrossShards) {
  EXPECT_FALSE(from_name<ShardingKind>("striped").has_value());
  EXPECT_EQ(choices<ShardingKind>(), "contiguous | zigzag | dual_chunk");
  for (const DType dtype : kAllDTypes)
    expect_everywhere(u_recipe(batch_of_one(3, 10), MaskKind::causal, dtype),
                      [](std::int64_t j, auto) { return first_keys(7 + j + 1); });
}

TEST(BC_004, ZigzagWithoutAMask) {
  for (const std::int64_t tokens : {8, 16})
    for (const DType dtype : kAllDTypes)
      expect_everywhere(u_recipe(batch_of_one(tokens, tokens), MaskKind::full, dtype),
                        [&](auto, auto) { return first_keys(tokens); });
}

// No length is refused: chunks are dealt as evenly as they go.
TEST(BC_008, LengthsThatNothingDivides) {
  for (const std::int64_t tokens : {9, 33})
    for (const DType dtype : kAllDTypes)
      expect_everywhere(u_recipe(batch_of_one(tokens, tokens), MaskKind::causal, dtype),
                        [](std::int64_t i, auto) { return first_keys(i + 1); });
}

// Left padding: the document's keys begin at row 2, its queries at row 0; bottom-right alignment
// then is the causal mask of the whole sequence.
TEST(BC_028, LeftPaddedKeysUnderACausalMask) {
  const SequenceBatch batch{{{0, 8, 2, 6}}, 8, 8};
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch, MaskKind::causal, dtype);
    for (std::int64_t j = 2; j < 8; ++j)
      for (std::int64_t d = 0; d < 8; ++d) problem.v.set(j, 0, d, static_cast<float>(j));
    ASSERT_TRUE(std::isnan(problem.k.at(1, 0, 0)));
    expect_everywhere(problem, [](std::int64_t i, auto) {
      if (i < 2) return RowAnswer{};
      return RowAnswer{static_cast<double>(i + 2) / 2, std::log(static_cast<double>(i - 1))};
    });
  }
}

// Keys 48..63 of 64 as the keys of a document: the ranks that hold none of them contribute nothing.
TEST(BC_032, OnlyTheLastKeysVisible) {
  const SequenceBatch batch{{{0, 5, 48, 16}}, 5, 64};
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch, MaskKind::full, dtype);
    for (std::int64_t j = 48; j < 64; ++j)
      for (std::int64_t d = 0; d < 8; ++d) problem.v.set(j, 0, d, static_cast<float>(j));
    expect_everywhere(problem,
                      [](auto, auto) {
                        return RowAnswer{55.5, std::log(16.0)};
                      },
                      {.world_sizes = {1, 4}, .chunk_sizes = {16, 32}});
  }
}

// The state of a row whose first block was wholly masked: 80 queries over 64 keys in chunks of 32.
// Rows 32..47 see nothing of keys 32..63, which two ranks and shuffled arrival bring first.
TEST(BC_032, AMaskedBlockBeforeTheVisibleOnes) {
  for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
    for (std::int64_t seed = 0; seed < 6; ++seed) {
      AttentionCase problem = u_recipe(batch_of_one(80, 64), MaskKind::causal, DType::f32);
      problem.config.chunk_tokens = 32;
      problem.config.schedule = schedule;
      problem.config.shuffle_arrival = seed;
      for (const int world_size : {1, 2, 3})
        expect_answer(problem, attend(problem, world_size),
                      [](std::int64_t i, auto) { return first_keys(i - 15); });
    }
}

TEST(BC_033, MoreQueriesThanKeys) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch_of_one(6, 4), MaskKind::causal, dtype);
    problem.q.fill([](auto...) { return 1.0f; });
    expect_everywhere(problem, [](std::int64_t i, auto) { return first_keys(i - 1); });
  }
}

}  // namespace
}  // namespace cpattn::testing
