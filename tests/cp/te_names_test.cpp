#include "cp/te_names.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cp/shard_tools.h"

namespace cpattn::te {
namespace {

using Numbers = std::vector<std::int64_t>;

// Sequences of padded lengths 8, 0 and 16 on two ranks: parts of 2, 0 and 4.
const CuSeqlens kPadded{0, 8, 8, 24};

TEST(TeNames, PartitionedIndicesAreTheFirstAndTheMirroredPartOfEachSequence) {
  EXPECT_EQ(thd_get_partitioned_indices(kPadded, 24, 2, 0),
            (Numbers{0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(thd_get_partitioned_indices(kPadded, 24, 2, 1),
            (Numbers{2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19}));
}

TEST(TeNames, EveryRowHasOneOwner) {
  const CuSeqlens padded{0, 28, 42, 140};  // multiples of 14 = 2 * 7
  Numbers all;
  for (int rank = 0; rank < 7; ++rank) {
    const Numbers own = thd_get_partitioned_indices(padded, 140, 7, rank);
    EXPECT_EQ(own.size(), 20u);
    all.insert(all.end(), own.begin(), own.end());
  }
  std::sort(all.begin(), all.end());
  Numbers expected(140);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(all, expected);
}

TEST(TeNames, OneRankHasEverythingAndDividesNothing) {
  EXPECT_EQ(thd_get_partitioned_indices({0, 3}, 3, 1, 0), (Numbers{0, 1, 2}));
}

// 5 of 8 and 16 of 16 tokens are valid; parts of 2 and 4 tokens.
TEST(TeNames, ValidLengthsOnARank) {
  const CuSeqlens cu{0, 5, 5, 21}, on_rank{0, 4, 4, 12};
  EXPECT_EQ(get_cu_seqlens_on_cp_rank(cu, on_rank, 2, 0, true, true), (CuSeqlens{0, 2, 2, 10}));
  EXPECT_EQ(get_cu_seqlens_on_cp_rank(cu, on_rank, 2, 1, true, true), (CuSeqlens{0, 3, 3, 11}));
  EXPECT_EQ(get_cu_seqlens_on_cp_rank(cu, on_rank, 2, 1, true, false), (CuSeqlens{0, 2, 2, 6}));
  EXPECT_EQ(get_cu_seqlens_on_cp_rank(cu, on_rank, 2, 1, false, true), (CuSeqlens{0, 1, 1, 5}));
}

TEST(TeNames, PaddingGoesToTheEndOfEachSequence) {
  const Numbers ids{1, 2, 3, 4, 5}, labels{11, 12, 13, 14, 15};
  const auto padded = pad_thd_sequences_for_cp(ids, labels, {0, 3, 3, 5}, 4);
  EXPECT_EQ(padded.cu_seqlens_padded, (CuSeqlens{0, 4, 4, 8}));
  EXPECT_EQ(padded.input_ids, (Numbers{1, 2, 3, 0, 4, 5, 0, 0}));
  EXPECT_EQ(padded.labels, (Numbers{11, 12, 13, -100, 14, 15, -100, -100}));
  EXPECT_EQ(generate_positional_ids_for_cp({0, 3, 3, 5}, 4), (Numbers{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST(TeNames, ABatchIsSlicedLikeItsIndices) {
  Numbers ids(24), labels(24), places(24);
  for (std::size_t i = 0; i < 24; ++i) {
    const auto n = static_cast<std::int64_t>(i);
    ids[i] = n;
    labels[i] = 100 + n;
    places[i] = 200 + n;
  }
  for (const int rank : {0, 1}) {
    const RankBatch own = get_batch_on_this_cp_rank(kPadded, ids, labels, places, 2, rank);
    const Numbers rows = thd_get_partitioned_indices(kPadded, 24, 2, rank);
    EXPECT_EQ(own.input_ids, rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(own.labels[i], 100 + rows[i]);
      EXPECT_EQ(own.position_ids[i], 200 + rows[i]);
    }
  }
}

// A pipeline that shards by these names and a dual_chunk plan mean the same rows.
TEST(TeNames, AgreeWithDualChunkSharding) {
  CpConfig config;
  config.sharding = ShardingKind::dual_chunk;
  config.chunk_tokens = 3;  // borders fall where they like
  const CuSeqlens padded{0, 48, 48, 144};
  const SequenceBatch full = batch_from_cu_seqlens(padded, padded, 144, 144);
  for (const int world_size : {1, 2, 3, 4}) {
    const Sharding sharding = make_sharding(full, config, world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      const auto& chunks = sharding.shards[static_cast<std::size_t>(rank)].q;
      EXPECT_EQ(global_rows(chunks), thd_get_partitioned_indices(padded, 144, world_size, rank));
      CuSeqlens on_rank = padded;
      for (std::int64_t& length : on_rank) length /= world_size;
      EXPECT_EQ(local_cu_seqlens(3, chunks), on_rank);
      if (world_size > 1) {
        EXPECT_EQ(get_cu_seqlens_on_cp_rank(padded, on_rank, world_size, rank, true, true),
                  on_rank);
      }
    }
  }
}

TEST(TeNames, RefusesWhatDoesNotFit) {
  EXPECT_THROW(thd_get_partitioned_indices({0, 6}, 6, 2, 0), InvalidArgument);
  EXPECT_THROW(thd_get_partitioned_indices({0, 8}, 7, 2, 0), InvalidArgument);
  EXPECT_THROW(thd_get_partitioned_indices({0, 8}, 8, 2, 2), InvalidArgument);
  EXPECT_THROW(thd_get_partitioned_indices({0, 8, 4}, 4, 2, 0), InvalidArgument);
  EXPECT_THROW(get_cu_seqlens_on_cp_rank({0, 9}, {0, 4}, 2, 0, true, true), InvalidArgument);
  EXPECT_THROW(get_cu_seqlens_on_cp_rank({0, 5}, {0, 3}, 2, 0, true, true), InvalidArgument);
  EXPECT_THROW(get_cu_seqlens_on_cp_rank({0, 5, 6}, {0, 4}, 2, 0, true, true), InvalidArgument);
  EXPECT_THROW(padded_cu_seqlens({0, 3}, 0), InvalidArgument);
  EXPECT_THROW(pad_thd_sequences_for_cp(Numbers{1}, Numbers{1}, {0, 2}, 4), InvalidArgument);
  EXPECT_THROW(get_batch_on_this_cp_rank({0, 8}, Numbers(7), Numbers(8), Numbers(8), 2, 0),
               InvalidArgument);
}

}  // namespace
}  // namespace cpattn::te
