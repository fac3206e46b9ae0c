#include "cp/visibility.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace cpattn::testing {
namespace {

/// Pairs a block shows, row by row, from the definition of the mask.
std::int64_t pairs_of(const Document& d, const OwnedChunk& q, const OwnedChunk& kv, MaskKind mask) {
  std::int64_t pairs = 0;
  for (std::int64_t i = q.first; i < q.first + q.num_tokens; ++i)
    for (std::int64_t j = kv.first; j < kv.first + kv.num_tokens; ++j)
      pairs += mask == MaskKind::full || j <= i + d.kv_tokens - d.q_tokens ? 1 : 0;
  return pairs;
}

TEST(Visibility, AgreesWithEveryPair) {
  int visible = 0, hidden = 0;
  for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
    for (const std::int64_t q_tokens : {1, 4, 12, 20})
      for (const std::int64_t kv_tokens : {1, 4, 12, 20})
        for (const std::int64_t chunk_tokens : {1, 3, 4, 32})
          for (const std::int64_t num_parts : {1, 4}) {
            if (q_tokens % num_parts != 0 || kv_tokens % num_parts != 0) continue;
            const Document d{0, q_tokens, 0, kv_tokens};
            const ChunkGrid q_grid{q_tokens, chunk_tokens, q_tokens / num_parts};
            const ChunkGrid kv_grid{kv_tokens, chunk_tokens, kv_tokens / num_parts};
            const auto chunk_of = [](const ChunkGrid& grid, std::int64_t index) {
              const std::int64_t first = grid.begin(index);
              return OwnedChunk{0, index, first, grid.end(index) - first, first, 0};
            };
            for (std::int64_t i = 0; i < q_grid.num_chunks(); ++i)
              for (std::int64_t j = 0; j < kv_grid.num_chunks(); ++j) {
                const OwnedChunk q = chunk_of(q_grid, i), kv = chunk_of(kv_grid, j);
                const std::int64_t expected = pairs_of(d, q, kv, mask);
                ASSERT_EQ(j<num_visible_kv_chunks(d, q, mask, kv_grid), expected> 0);
                ASSERT_EQ(i >= first_seeing_q_chunk(d, kv, mask, q_grid), expected > 0);
                const BlockMask block = block_mask(d, q, kv, mask);
                std::int64_t pairs = 0;
                for (std::int64_t row = 0; row < q.num_tokens; ++row)
                  pairs += block.visible_keys(row, kv.num_tokens);
                ASSERT_EQ(pairs, expected);
                ++(expected > 0 ? visible : hidden);
              }
          }
  EXPECT_GT(visible, 1000);
  EXPECT_GT(hidden, 1000);
}

TEST(Visibility, WithoutTheOtherSideNothingIsSeen) {
  const ChunkGrid none{0, 4, 0};
  EXPECT_EQ(num_visible_kv_chunks({0, 8, 0, 0}, {0, 1, 4, 4, 4, 4}, MaskKind::full, none), 0);
  EXPECT_EQ(num_visible_kv_chunks({0, 8, 0, 0}, {0, 1, 4, 4, 4, 4}, MaskKind::causal, none), 0);
  for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
    EXPECT_EQ(first_seeing_q_chunk({0, 0, 0, 8}, {0, 1, 4, 4, 4, 4}, mask, none), 0);
}

}  // namespace
}  // namespace cpattn::testing
