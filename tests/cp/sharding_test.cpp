#include "cp/sharding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "src/base/error.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

constexpr std::array kKinds{ShardingKind::contiguous, ShardingKind::zigzag};
constexpr std::array kMasks{MaskKind::full, MaskKind::causal};

CpConfig config_of(ShardingKind sharding, MaskKind mask, std::int64_t chunk_tokens) {
  CpConfig config;
  config.sharding = sharding;
  config.mask = mask;
  config.chunk_tokens = chunk_tokens;
  return config;
}

std::string describe(const CpConfig& config, int world_size) {
  return std::string(name_of(config.sharding)) + " " + std::string(name_of(config.mask)) +
         ", chunks of " + std::to_string(config.chunk_tokens) +
         ", P = " + std::to_string(world_size);
}

/// One side of a document: where its rows begin and how many there are.
struct Side {
  std::int64_t begin;
  std::int64_t tokens;
};

/// Checks the chunks a rank owns of one side (q or kv) and counts every global row it owns.
void check_chunks(const std::vector<OwnedChunk>& chunks, std::int64_t num_local,
                  const std::vector<Side>& sides, std::int64_t chunk_tokens,
                  std::vector<int>& owners) {
  std::int64_t local = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const OwnedChunk& chunk = chunks[i];
    const Side& side = sides[static_cast<std::size_t>(chunk.document)];
    ASSERT_EQ(chunk.local_begin, local);
    ASSERT_EQ(chunk.first, chunk.chunk * chunk_tokens);
    ASSERT_EQ(chunk.num_tokens, std::min(chunk_tokens, side.tokens - chunk.first));
    ASSERT_GT(chunk.num_tokens, 0);
    ASSERT_EQ(chunk.row_begin, side.begin + chunk.first);
    if (i > 0) {
      ASSERT_LT(std::pair(chunks[i - 1].document, chunks[i - 1].chunk),
                std::pair(chunk.document, chunk.chunk));
    }
    for (std::int64_t row = chunk.row_begin; row < chunk.row_begin + chunk.num_tokens; ++row)
      ++owners[static_cast<std::size_t>(row)];
    local += chunk.num_tokens;
  }
  ASSERT_EQ(num_local, local);
}

/// Every row of a document has one owner, every padding row none.
void check_owners(const std::vector<int>& owners, const std::vector<Side>& sides) {
  std::vector<int> expected(owners.size(), 0);
  for (const Side& side : sides)
    for (std::int64_t i = 0; i < side.tokens; ++i)
      expected[static_cast<std::size_t>(side.begin + i)] = 1;
  ASSERT_EQ(owners, expected);
}

std::int64_t total_pairs(const SequenceBatch& batch, MaskKind mask) {
  std::int64_t pairs = 0;
  for (const Document& document : batch.documents)
    for (std::int64_t i = 0; i < document.q_tokens; ++i)
      pairs += mask == MaskKind::full
                   ? document.kv_tokens
                   : std::max<std::int64_t>(0, i + 1 + document.kv_tokens - document.q_tokens);
  return pairs;
}

void check_sharding(const SequenceBatch& batch, const CpConfig& config, int world_size) {
  const Sharding sharding = make_sharding(batch, config, world_size);

  ASSERT_EQ(sharding.shards.size(), static_cast<std::size_t>(world_size));
  std::vector<Side> q, kv;
  for (const Document& document : batch.documents) {
    q.push_back({document.q_begin, document.q_tokens});
    kv.push_back({document.kv_begin, document.kv_tokens});
  }
  std::vector<int> q_owners(static_cast<std::size_t>(batch.q_rows), 0);
  std::vector<int> kv_owners(static_cast<std::size_t>(batch.kv_rows), 0);
  std::int64_t pairs = 0;
  for (const Shard& shard : sharding.shards) {
    ASSERT_NO_FATAL_FAILURE(check_chunks(shard.q, shard.q_rows, q, config.chunk_tokens, q_owners));
    ASSERT_NO_FATAL_FAILURE(
        check_chunks(shard.kv, shard.kv_rows, kv, config.chunk_tokens, kv_owners));
    std::int64_t own_pairs = 0;
    for (const OwnedChunk& chunk : shard.q)
      own_pairs += visible_pairs(batch.documents[static_cast<std::size_t>(chunk.document)],
                                 config.mask, chunk.first, chunk.num_tokens);
    ASSERT_EQ(shard.visible_pairs, own_pairs);
    pairs += own_pairs;
  }
  ASSERT_NO_FATAL_FAILURE(check_owners(q_owners, q));
  ASSERT_NO_FATAL_FAILURE(check_owners(kv_owners, kv));
  ASSERT_EQ(pairs, total_pairs(batch, config.mask));
}

void check_all_ways(const SequenceBatch& batch, const std::vector<std::int64_t>& chunk_sizes,
                    const std::vector<int>& world_sizes) {
  for (const ShardingKind kind : kKinds)
    for (const MaskKind mask : kMasks)
      for (const std::int64_t chunk_tokens : chunk_sizes)
        for (const int world_size : world_sizes) {
          const CpConfig config = config_of(kind, mask, chunk_tokens);
          SCOPED_TRACE(describe(config, world_size));
          ASSERT_NO_FATAL_FAILURE(check_sharding(batch, config, world_size));
        }
}

TEST(Sharding, EveryTokenHasOneOwner) {
  for (const NamedBatch& named : small_batches()) {
    SCOPED_TRACE(named.name);
    check_all_ways(named.batch, {1, 2, 5, 16, 512}, {1, 2, 3, 4, 5, 6, 7, 8});
  }
}

TEST(Sharding, EveryLengthHasOneOwner) {
  for (std::int64_t length = 0; length <= 40; ++length)
    check_all_ways(batch_of_one(length, length), {1, 3, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
}

TEST(Sharding, RandomPacksHaveOneOwner) {
  for (std::uint64_t seed = 0; seed < 10; ++seed)
    check_all_ways(random_pack(seed, 30, 90), {4, 16}, {2, 3, 8});
}

TEST(Sharding, ThousandsOfTinyDocuments) {
  const SequenceBatch batch = random_pack(99, 5000, 2);
  check_all_ways(batch, {1, 512}, {2, 7});
  // They cannot be cut, but they can be spread: nobody is more than one document off the mean.
  for (const ShardingKind kind : kKinds) {
    const Sharding sharding = make_sharding(batch, config_of(kind, MaskKind::causal, 512), 4);
    EXPECT_LE(sharding.imbalance(), 1.05) << name_of(kind);
  }
}

TEST(BC_006, ShardsOfEightTokens) {
  const SequenceBatch batch = batch_of_one(8, 8);
  for (const std::int64_t chunk_tokens : {1, 2}) {
    const auto rows = [&](ShardingKind kind, std::size_t rank) {
      const Sharding sharding =
          make_sharding(batch, config_of(kind, MaskKind::causal, chunk_tokens), 2);
      EXPECT_EQ(global_rows(sharding.shards[rank].q), global_rows(sharding.shards[rank].kv));
      return global_rows(sharding.shards[rank].q);
    };
    using Rows = std::vector<std::int64_t>;
    EXPECT_EQ(rows(ShardingKind::contiguous, 0), (Rows{0, 1, 2, 3}));
    EXPECT_EQ(rows(ShardingKind::contiguous, 1), (Rows{4, 5, 6, 7}));
    EXPECT_EQ(rows(ShardingKind::zigzag, 0), (Rows{0, 1, 6, 7}));
    EXPECT_EQ(rows(ShardingKind::zigzag, 1), (Rows{2, 3, 4, 5}));
  }
}

TEST(BC_006, ShardAndGatherIsTheIdentity) {
  for (const std::int64_t length : {5, 7, 8, 9})
    for (const int world_size : {2, 4})
      for (const ShardingKind kind : kKinds) {
        const Sharding sharding = make_sharding(batch_of_one(length, length),
                                                config_of(kind, MaskKind::full, 1), world_size);
        std::vector<std::int64_t> gathered(static_cast<std::size_t>(length), -1);
        for (const Shard& shard : sharding.shards)
          for (const std::int64_t row : global_rows(shard.q))
            gathered[static_cast<std::size_t>(row)] = row;
        std::vector<std::int64_t> identity(static_cast<std::size_t>(length));
        std::iota(identity.begin(), identity.end(), 0);
        EXPECT_EQ(gathered, identity) << name_of(kind) << " " << length;
      }
}

TEST(Sharding, RunsOfADocumentAreEvenAndOrdered) {
  for (const int world_size : {2, 3, 4, 7, 8})
    for (const std::int64_t chunks : {1, 5, 16, 61, 64}) {
      const SequenceBatch batch = batch_of_one(4 * chunks - 1, 4 * chunks - 1);
      const Sharding contiguous = make_sharding(
          batch, config_of(ShardingKind::contiguous, MaskKind::causal, 4), world_size);
      std::int64_t next = 0;
      for (const Shard& shard : contiguous.shards) {  // rank r owns the r-th run
        for (const OwnedChunk& chunk : shard.q) EXPECT_EQ(chunk.chunk, next++);
        const auto size = static_cast<std::int64_t>(shard.q.size());
        EXPECT_GE(size, chunks / world_size);
        EXPECT_LE(size, chunks / world_size + 1);
      }
      const Sharding zigzag =
          make_sharding(batch, config_of(ShardingKind::zigzag, MaskKind::causal, 4), world_size);
      for (const Shard& shard : zigzag.shards) {  // two runs, each even to two chunks
        int runs = shard.q.empty() ? 0 : 1;
        for (std::size_t i = 1; i < shard.q.size(); ++i)
          runs += shard.q[i].chunk == shard.q[i - 1].chunk + 1 ? 0 : 1;
        EXPECT_LE(runs, 2);
        const std::int64_t even = chunks / (2 * world_size);
        EXPECT_LE(static_cast<std::int64_t>(shard.q.size()), 2 * (even + 2));
        if (chunks % (2 * world_size) == 0) {  // the classic zigzag
          EXPECT_EQ(static_cast<std::int64_t>(shard.q.size()), 2 * even);
        }
      }
    }
}

TEST(Sharding, CausalZigzagIsBalancedFromSixtyFourChunksOn) {
  for (int world_size = 2; world_size <= 8; ++world_size)
    for (const std::int64_t chunks : {64, 65, 67, 71, 79, 83, 97, 100, 127, 128, 129, 200, 255})
      for (const std::int64_t short_of : {0, 1, 7}) {
        const std::int64_t tokens = 8 * chunks - short_of;
        const Sharding sharding =
            make_sharding(batch_of_one(tokens, tokens),
                          config_of(ShardingKind::zigzag, MaskKind::causal, 8), world_size);
        EXPECT_LE(sharding.imbalance(), 1.05) << tokens << " tokens, P = " << world_size;
      }
}

/// The rows rank `rank` of a trainer that splits every document into 2P parts has, in its order.
std::vector<std::int64_t> dual_chunk_rows(const std::vector<Side>& sides, int rank,
                                          int world_size) {
  std::vector<std::int64_t> rows;
  for (const Side& side : sides) {
    const std::int64_t part = side.tokens / (2 * world_size);
    for (const std::int64_t p : {rank, 2 * world_size - 1 - rank})
      for (std::int64_t i = p * part; i < (p + 1) * part; ++i) rows.push_back(side.begin + i);
  }
  return rows;
}

TEST(DualChunk, EveryRankHasTheRowsATrainerGivesIt) {
  const SequenceBatch batch =
      pack({24, 0, 48, 72}, {48, 24, 48, 0});  // multiples of 2P for P = 1, 2, 3, 4
  std::vector<Side> q, kv;
  for (const Document& document : batch.documents) {
    q.push_back({document.q_begin, document.q_tokens});
    kv.push_back({document.kv_begin, document.kv_tokens});
  }
  for (const MaskKind mask : kMasks)
    for (const std::int64_t chunk_tokens : {1, 2, 4, 5, 7, 512})
      for (const int world_size : {1, 2, 3, 4}) {
        const CpConfig config = config_of(ShardingKind::dual_chunk, mask, chunk_tokens);
        SCOPED_TRACE(describe(config, world_size));
        const Sharding sharding = make_sharding(batch, config, world_size);
        std::int64_t pairs = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const Shard& shard = sharding.shards[static_cast<std::size_t>(rank)];
          ASSERT_EQ(global_rows(shard.q), dual_chunk_rows(q, rank, world_size));
          ASSERT_EQ(global_rows(shard.kv), dual_chunk_rows(kv, rank, world_size));
          ASSERT_EQ(shard.q_rows, 144 / world_size);
          for (const OwnedChunk& chunk : shard.q) ASSERT_LE(chunk.num_tokens, chunk_tokens);
          pairs += shard.visible_pairs;
        }
        ASSERT_EQ(pairs, total_pairs(batch, mask));
      }
}

TEST(DualChunk, ChunksAreThoseOfTheDocumentWhereItsPartsAllowIt) {
  // Parts of 48 / 6 = 8 tokens: chunks of 4 meet their borders, chunks of 5 do not.
  const SequenceBatch batch = batch_of_one(48, 48);
  for (const std::int64_t chunk_tokens : {1, 2, 4, 8}) {
    const CpConfig config = config_of(ShardingKind::dual_chunk, MaskKind::causal, chunk_tokens);
    EXPECT_FALSE(chunk_grid(48, config, 3).is_fragmented());
    ASSERT_NO_FATAL_FAILURE(check_sharding(batch, config, 3));
  }
  const CpConfig config = config_of(ShardingKind::dual_chunk, MaskKind::causal, 5);
  EXPECT_TRUE(chunk_grid(48, config, 3).is_fragmented());
  const Sharding sharding = make_sharding(batch, config, 3);
  std::vector<std::int64_t> firsts;
  for (const OwnedChunk& chunk : sharding.shards[1].q) firsts.push_back(chunk.first);
  EXPECT_EQ(firsts, (std::vector<std::int64_t>{8, 13, 32, 37}));
  EXPECT_FALSE(chunk_grid(48, config, 1).is_fragmented()) << "one rank cuts no document";
}

TEST(DualChunk, LengthsThatCannotBeDividedAreNamed) {
  const CpConfig config = config_of(ShardingKind::dual_chunk, MaskKind::causal, 8);
  const SequenceBatch batch = pack({48, 50, 24}, {48, 48, 27});
  std::string text;
  try {
    make_sharding(batch, config, 2);
  } catch (const InvalidArgument& error) {
    text = error.what();
  }
  EXPECT_EQ(text,
            "sharding dual_chunk: document 1: 50 query and 48 key tokens; document 2: 24 query and "
            "27 key tokens; expected multiples of 2 * 2 ranks = 4");
  EXPECT_NO_THROW(make_sharding(batch, config, 1));
}

TEST(ChunkGrid, PlacesAndChunksAreInverse) {
  for (const std::int64_t parts : {1, 4, 6})
    for (const std::int64_t part : {1, 5, 8, 12})
      for (const std::int64_t chunk_tokens : {1, 3, 4, 8, 100}) {
        const ChunkGrid grid{parts * part, chunk_tokens, part};
        std::int64_t next = 0;
        for (std::int64_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
          ASSERT_EQ(grid.begin(chunk), next);
          ASSERT_GT(grid.end(chunk), next);
          ASSERT_LE(grid.end(chunk) - next, chunk_tokens);
          for (; next < grid.end(chunk); ++next) ASSERT_EQ(grid.chunk_at(next), chunk);
        }
        ASSERT_EQ(next, grid.tokens);
      }
  EXPECT_EQ((ChunkGrid{0, 8, 0}.num_chunks()), 0);
}

TEST(Sharding, ImbalanceIsTheBusiestOverTheMean) {
  Sharding sharding;
  sharding.shards.resize(4);
  EXPECT_EQ(sharding.imbalance(), 1.0);  // no pairs at all
  sharding.shards[1].visible_pairs = 6;
  sharding.shards[2].visible_pairs = 2;
  EXPECT_DOUBLE_EQ(sharding.imbalance(), 3.0);
}

TEST(Sharding, VisiblePairsInClosedForm) {
  const Document tail{0, 4, 0, 6};          // query i sees i + 3 keys
  const Document more_queries{0, 6, 0, 4};  // queries 0 and 1 see none
  EXPECT_EQ(visible_pairs(tail, MaskKind::causal, 0, 4), 3 + 4 + 5 + 6);
  EXPECT_EQ(visible_pairs(tail, MaskKind::causal, 1, 2), 4 + 5);
  EXPECT_EQ(visible_pairs(tail, MaskKind::full, 1, 2), 12);
  EXPECT_EQ(visible_pairs(more_queries, MaskKind::causal, 0, 6), 1 + 2 + 3 + 4);
  EXPECT_EQ(visible_pairs(more_queries, MaskKind::causal, 0, 2), 0);
  EXPECT_EQ(visible_pairs(more_queries, MaskKind::causal, 1, 2), 1);
  constexpr std::int64_t kLong = std::int64_t{1} << 31;
  EXPECT_EQ(visible_pairs({0, kLong, 0, kLong}, MaskKind::causal, kLong - 2, 2), 2 * kLong - 1);
}

TEST(Sharding, EveryRankComputesTheSame) {
  const SequenceBatch batch = random_pack(5, 40, 200);
  const CpConfig config = config_of(ShardingKind::zigzag, MaskKind::causal, 16);
  const Sharding first = make_sharding(batch, config, 4), second = make_sharding(batch, config, 4);
  for (std::size_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(global_rows(first.shards[rank].kv), global_rows(second.shards[rank].kv));
}

}  // namespace
}  // namespace cpattn::testing
