#include "cp/ring_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "cp/plan.h"
#include "cp/visibility.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

CpConfig config_of(ShardingKind sharding, MaskKind mask, std::int64_t chunk_tokens = 8) {
  CpConfig config;
  config.sharding = sharding;
  config.mask = mask;
  config.chunk_tokens = chunk_tokens;
  return config;
}

/// One document, packs of short, empty and unequal ones, and keys without queries or the reverse.
std::vector<SequenceBatch> batches() {
  return {batch_of_one(100, 100),
          batch_of_one(40, 100),
          batch_of_one(100, 40),
          pack({31, 0, 7, 64, 1}),
          pack(std::vector<std::int64_t>(20, 5)),
          batch_from_cu_seqlens({0, 0, 30, 30, 50}, {0, 20, 50, 58, 90}, 50, 90)};
}

/// f(batch, config, sharding, direction) of everything.
template <class F>
void for_every_ring(F&& f) {
  for (const SequenceBatch& batch : batches())
    for (const auto kind : {ShardingKind::contiguous, ShardingKind::zigzag})
      for (const auto mask : {MaskKind::full, MaskKind::causal})
        for (const int world_size : {1, 2, 3, 4, 7})
          for (const int direction : {1, -1}) {
            const CpConfig config = config_of(kind, mask);
            f(batch, config, make_sharding(batch, config, world_size), direction);
          }
}

bool sees(const SequenceBatch& batch, const CpConfig& config, int world_size, const Shard& shard,
          const OwnedChunk& kv) {
  return std::any_of(shard.q.begin(), shard.q.end(), [&](const OwnedChunk& q) {
    if (q.document != kv.document) return false;
    const Document& document = batch.documents[static_cast<std::size_t>(q.document)];
    const ChunkGrid grid = chunk_grid(document.kv_tokens, config, world_size);
    return kv.chunk < num_visible_kv_chunks(document, q, config.mask, grid);
  });
}

TEST(Reach, EndsAtTheLastRankThatSeesTheChunk) {
  for_every_ring([](const SequenceBatch& batch, const CpConfig& config, const Sharding& sharding,
                    int direction) {
    const int world_size = static_cast<int>(sharding.shards.size());
    const Reach reach = make_reach(batch, sharding, config, direction);
    for (int owner = 0; owner < world_size; ++owner) {
      const std::vector<OwnedChunk>& kv = sharding.shards[static_cast<std::size_t>(owner)].kv;
      ASSERT_EQ(reach[static_cast<std::size_t>(owner)].size(), kv.size());
      for (std::size_t i = 0; i < kv.size(); ++i) {
        int last = 0;
        for (int hops = 1; hops < world_size; ++hops) {
          const int rank = (owner + hops * direction + world_size * hops) % world_size;
          const Shard& there = sharding.shards[static_cast<std::size_t>(rank)];
          if (sees(batch, config, world_size, there, kv[i])) last = hops;
        }
        EXPECT_EQ(reach[static_cast<std::size_t>(owner)][i], last)
            << "rank " << owner << " of " << world_size << ", direction " << direction
            << ", document " << kv[i].document << " chunk " << kv[i].chunk;
      }
    }
  });
}

std::size_t packed_bytes(std::int64_t num_keys) { return static_cast<std::size_t>(num_keys) * 64; }

TEST(RingLayout, WhatGoesOnIsTheBeginningOfWhatCame) {
  for_every_ring([](const SequenceBatch& batch, const CpConfig& config, const Sharding& sharding,
                    int direction) {
    const int world_size = static_cast<int>(sharding.shards.size());
    const Reach reach = make_reach(batch, sharding, config, direction);
    std::vector<RingLayout> layouts;
    for (int rank = 0; rank < world_size; ++rank)
      layouts.emplace_back(sharding, reach, rank, direction, packed_bytes);
    for (int rank = 0; rank < world_size; ++rank) {
      const RingLayout& mine = layouts[static_cast<std::size_t>(rank)];
      const RingLayout& next =
          layouts[static_cast<std::size_t>((rank + direction + world_size) % world_size)];
      EXPECT_EQ(mine.bytes().held[0], mine.span_bytes()[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(mine.bytes().passed_on.back(), 0u);
      std::size_t sent = 0;
      const auto num_steps = static_cast<std::size_t>(num_ring_steps(reach));
      ASSERT_EQ(mine.bytes().held.size(), num_steps);
      ASSERT_EQ(mine.bytes().passed_on.size(), num_steps);
      for (std::size_t step = 0; step < num_steps; ++step) {
        EXPECT_LE(mine.bytes().passed_on[step], mine.bytes().held[step]);
        if (step + 1 < num_steps) {
          EXPECT_EQ(next.bytes().held[step + 1], mine.bytes().passed_on[step]);
        }
        sent += mine.bytes().passed_on[step];
      }
      EXPECT_EQ(mine.bytes_sent(), sent);
    }
  });
}

TEST(RingLayout, ChunksThatAreHereLieApartWithinWhatIsHeld) {
  for_every_ring([](const SequenceBatch& batch, const CpConfig& config, const Sharding& sharding,
                    int direction) {
    const int world_size = static_cast<int>(sharding.shards.size());
    const Reach reach = make_reach(batch, sharding, config, direction);
    const std::byte* const span = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 20);
    for (int rank = 0; rank < world_size; ++rank) {
      const RingLayout layout(sharding, reach, rank, direction, packed_bytes);
      for (int step = 0; step < num_ring_steps(reach); ++step) {
        const int owner = (rank - step * direction + world_size * world_size) % world_size;
        const std::vector<OwnedChunk>& kv = sharding.shards[static_cast<std::size_t>(owner)].kv;
        std::vector<KvBlock> blocks;
        layout.bind(owner, static_cast<std::size_t>(step), span, blocks);
        ASSERT_EQ(blocks.size(), kv.size());
        std::map<std::size_t, std::size_t> ends;  // by offset
        for (std::size_t i = 0; i < blocks.size(); ++i) {
          const bool is_seen = sees(batch, config, world_size,
                                    sharding.shards[static_cast<std::size_t>(rank)], kv[i]);
          if (blocks[i].num_keys == 0) {
            EXPECT_FALSE(is_seen) << "chunk " << i << " of rank " << owner << " is missing";
            continue;
          }
          EXPECT_EQ(blocks[i].num_keys, kv[i].num_tokens);
          const auto offset = static_cast<std::size_t>(blocks[i].packed - span);
          ends[offset] = offset + packed_bytes(kv[i].num_tokens);
        }
        std::size_t end = 0;
        for (const auto& [offset, chunk_end] : ends) {
          EXPECT_EQ(offset, end);
          end = chunk_end;
        }
        EXPECT_EQ(layout.bytes().held[static_cast<std::size_t>(step)], end);
      }
    }
  });
}

std::size_t bytes_of_all(const SequenceBatch& batch, const CpConfig& config, int world_size,
                         int direction) {
  const Sharding sharding = make_sharding(batch, config, world_size);
  const Reach reach = make_reach(batch, sharding, config, direction);
  std::size_t bytes = 0;
  for (int rank = 0; rank < world_size; ++rank)
    bytes += RingLayout(sharding, reach, rank, direction, packed_bytes).bytes_sent();
  return bytes;
}

std::size_t bytes_of_all(const SequenceBatch& batch, const CpConfig& config, int world_size) {
  return bytes_of_all(batch, config, world_size, ring_direction(config));
}

TEST(RingLayout, NothingTravelsForNobody) {
  const std::size_t all = packed_bytes(96) * 3;  // 96 tokens to three other ranks
  const CpConfig full = config_of(ShardingKind::contiguous, MaskKind::full);
  EXPECT_EQ(bytes_of_all(batch_of_one(96, 96), full, 4), all);
  // Rank r of four goes to the 3 - r ranks after it.
  const CpConfig causal = config_of(ShardingKind::contiguous, MaskKind::causal);
  EXPECT_EQ(bytes_of_all(batch_of_one(96, 96), causal, 4), packed_bytes(24) * (3 + 2 + 1));
  // The early run of every rank goes to all others, the late one to the ranks before it.
  const CpConfig zigzag = config_of(ShardingKind::zigzag, MaskKind::causal, 4);
  EXPECT_EQ(bytes_of_all(batch_of_one(96, 96), zigzag, 4),
            packed_bytes(12) * (4 * 3 + (0 + 1 + 2 + 3)));
  // Each document is on one rank.
  for (const ShardingKind kind : {ShardingKind::contiguous, ShardingKind::zigzag}) {
    const CpConfig config = config_of(kind, MaskKind::causal);
    const SequenceBatch documents = pack(std::vector<std::int64_t>(12, 8));
    EXPECT_EQ(bytes_of_all(documents, config, 4), 0u);
    const Sharding sharding = make_sharding(documents, config, 4);
    EXPECT_EQ(num_ring_steps(make_reach(documents, sharding, config, 1)), 1);
  }
}

TEST(RingLayout, TheRingTurnsWhereFewerBytesTravel) {
  for (const auto kind : {ShardingKind::contiguous, ShardingKind::zigzag, ShardingKind::dual_chunk})
    for (const auto mask : {MaskKind::full, MaskKind::causal})
      for (const int world_size : {2, 3, 4, 8}) {
        const CpConfig config = config_of(kind, mask, 4);
        const SequenceBatch batch = batch_of_one(48 * world_size, 48 * world_size);
        const int direction = ring_direction(config);
        EXPECT_LE(bytes_of_all(batch, config, world_size, direction),
                  bytes_of_all(batch, config, world_size, -direction))
            << name_of(kind) << ' ' << name_of(mask) << ' ' << world_size << " ranks";
      }
}

}  // namespace
}  // namespace cpattn::testing
