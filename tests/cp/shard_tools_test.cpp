#include "cp/shard_tools.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cp/plan.h"
#include "cp/shard_rows.h"
#include "src/comm/loopback_comm.h"
#include "tests/support/batches.h"
#include "tests/support/compare.h"

namespace cpattn::testing {
namespace {

/// Every small batch, sharding and CP size that go together.
template <class Body>
void for_every_sharding(const Body& body) {
  for (const auto& [name, batch] : small_batches())
    for (const auto& [kind, kind_name] : EnumNames<ShardingKind>::kValues)
      for (const int world_size : {1, 2, 3, 4, 7}) {
        SCOPED_TRACE(cpattn::detail::concat(name, ", ", kind_name, ", CP", world_size));
        CpConfig config;
        config.sharding = kind;
        config.chunk_tokens = 5;
        if (!problems_with({.shape = {}, .batch = batch}, config, 0, world_size).empty()) {
          EXPECT_EQ(kind, ShardingKind::dual_chunk);  // lengths that 2P does not divide
          continue;
        }
        body(batch, config, make_sharding(batch, config, world_size));
      }
}

const std::vector<OwnedChunk>& side_of(const Shard& shard, ShardSide side) {
  return side == ShardSide::q ? shard.q : shard.kv;
}

/// Row t, head h, channel d is a number nobody else has.
HostTensor numbered(DType dtype, const HostTensor::Shape& shape) {
  HostTensor tensor(dtype, shape);
  return tensor.fill([&](std::int64_t t, std::int64_t h, std::int64_t d) {
    return static_cast<float>((t * shape[1] + h) * shape[2] + d);
  });
}

std::int64_t rows_of(const SequenceBatch& batch, ShardSide side) {
  return side == ShardSide::q ? batch.q_rows : batch.kv_rows;
}

/// By global row: which document covers it (-1: padding) and where in it.
struct Place {
  std::int64_t document = -1;
  std::int64_t position = 0;
};
std::vector<Place> places(const SequenceBatch& batch, ShardSide side) {
  std::vector<Place> all(static_cast<std::size_t>(rows_of(batch, side)));
  for (std::size_t d = 0; d < batch.documents.size(); ++d) {
    const Document& document = batch.documents[d];
    const bool is_q = side == ShardSide::q;
    for (std::int64_t i = 0; i < (is_q ? document.q_tokens : document.kv_tokens); ++i)
      all[static_cast<std::size_t>((is_q ? document.q_begin : document.kv_begin) + i)] = {
          static_cast<std::int64_t>(d), i};
  }
  return all;
}

/// Whether ShardRows on the CPU gathers `local`, and scatters it to where it is in `back`.
::testing::AssertionResult same_on_the_cpu_device(const HostTensor& global,
                                                  const std::vector<OwnedChunk>& chunks,
                                                  const HostTensor& local, const HostTensor& back) {
  CpuDevice cpu;
  const ShardRows rows(chunks, default_kernels(), cpu);
  HostTensor here(local.dtype(), local.shape(), {8, 4, 1});
  rows.shard(global.view(), here.view());
  if (const auto equal = bits_equal(here, local); !equal) return equal;
  HostTensor there = back;
  rows.unshard(std::as_const(here).view(), there.view());
  return bits_equal(there, back);
}

TEST(ShardTools, UnshardAfterShardIsTheIdentityOnDocuments) {
  for_every_sharding([](const SequenceBatch& batch, const CpConfig&, const Sharding& sharding) {
    for (const ShardSide side : {ShardSide::q, ShardSide::kv})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const HostTensor global = numbered(dtype, {rows_of(batch, side), 2, 3});
        HostTensor back(dtype, global.shape());
        for (const Shard& shard : sharding.shards) {
          const auto& chunks = side_of(shard, side);
          HostTensor local(dtype, {num_rows(chunks), 2, 3}, {8, 4, 1});  // with gaps
          shard_rows(global.view(), chunks, local.view());
          EXPECT_TRUE(bits_equal(local, global.rows(global_rows(chunks)).with_strides({8, 4, 1})));
          unshard_rows(std::as_const(local).view(), chunks, back.view());
          EXPECT_TRUE(same_on_the_cpu_device(global, chunks, local, back));
        }
        const auto all = places(batch, side);
        for (std::int64_t row = 0; row < global.tokens(); ++row) {
          const bool is_padding = all[static_cast<std::size_t>(row)].document < 0;
          if (is_padding) {
            EXPECT_TRUE(std::isnan(back.at(row, 0, 0))) << row;
          } else {
            EXPECT_EQ(back.bits_at(row, 1, 2), global.bits_at(row, 1, 2)) << row;
          }
        }
      }
  });
}

TEST(ShardTools, AllGatherBringsEverybodyEverything) {
  for_every_sharding([](const SequenceBatch& batch, const CpConfig&, const Sharding& sharding) {
    const HostTensor global = numbered(DType::f32, {batch.kv_rows, 2, 3});
    const auto all = places(batch, ShardSide::kv);
    LoopbackWorld(static_cast<int>(sharding.shards.size())).run([&](Communicator& comm) {
      const auto& chunks = sharding.shards[static_cast<std::size_t>(comm.rank())].kv;
      const HostTensor local = global.rows(global_rows(chunks));
      HostTensor gathered(DType::f32, global.shape());
      all_gather_rows(comm, sharding, ShardSide::kv, local.view(), gathered.view(),
                      deadline_after(Seconds(30)));
      for (std::int64_t row = 0; row < global.tokens(); ++row)
        if (all[static_cast<std::size_t>(row)].document >= 0) {
          EXPECT_EQ(gathered.at(row, 1, 2), global.at(row, 1, 2)) << row;
        }
    });
  });
}

TEST(ShardTools, AllGatherRefusesTogether) {
  const SequenceBatch batch = batch_of_one(20, 20);
  CpConfig config;
  config.chunk_tokens = 5;
  const Sharding sharding = make_sharding(batch, config, 2);
  const auto told = [&](auto&& wrong) {
    std::array<std::string, 2> texts;
    LoopbackWorld(2).run([&](Communicator& comm) {
      const auto me = static_cast<std::size_t>(comm.rank());
      HostTensor local = numbered(DType::f32, {num_rows(sharding.shards[me].q), 2, 3});
      HostTensor global(DType::f32, {20, 2, 3});
      AnyTensor from = local.view(), to = global.view();
      if (comm.rank() == 1) wrong(from, to);
      try {
        all_gather_rows(comm, sharding, ShardSide::q, from, to, deadline_after(Seconds(30)));
      } catch (const InvalidArgument& error) {
        texts[me] = error.what();
      }
    });
    EXPECT_EQ(texts[0], texts[1]);
    return texts[0];
  };
  EXPECT_EQ(told([](AnyTensor&, AnyTensor&) {}), "");
  EXPECT_EQ(told([](AnyTensor&, AnyTensor& to) { to.shape[0] = 19; }).find("rank 1: global: 19"),
            0u);
  EXPECT_EQ(told([](AnyTensor& from, AnyTensor&) { from.shape[0] -= 1; }).find("rank 1: local:"),
            0u);
  const std::string heads = told([](AnyTensor& from, AnyTensor& to) {
    from.shape[1] = 1;
    to.shape[1] = 1;
  });
  EXPECT_NE(heads.find("dimension 1 differs between ranks: rank 0 has 2, rank 1 has 1"),
            std::string::npos)
      << heads;
}

TEST(ShardTools, AllGatherOfTwoSidesIsRefused) {
  const SequenceBatch batch = batch_of_one(20, 20);
  CpConfig config;
  config.chunk_tokens = 5;
  const Sharding sharding = make_sharding(batch, config, 2);
  LoopbackWorld(2).run([&](Communicator& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    const HostTensor local = numbered(DType::f32, {num_rows(sharding.shards[me].q), 2, 3});
    HostTensor global(DType::f32, {20, 2, 3});
    const ShardSide side = comm.rank() == 0 ? ShardSide::q : ShardSide::kv;
    try {
      all_gather_rows(comm, sharding, side, local.view(), global.view(),
                      deadline_after(Seconds(30)));
      ADD_FAILURE() << "taken";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "side differs between ranks: rank 0 has q, rank 1 has kv");
    }
  });
}

TEST(ShardTools, ABindingCanRefuseAllGatherForItsRank) {
  const Sharding sharding = make_sharding(batch_of_one(20, 20), {}, 2);
  LoopbackWorld(2).run([&](Communicator& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    const HostTensor local = numbered(DType::f32, {num_rows(sharding.shards[me].q), 2, 3});
    HostTensor global(DType::f32, {20, 2, 3});
    const auto deadline = deadline_after(Seconds(30));
    try {
      if (comm.rank() == 1) refuse_all_gather_rows(comm, "not a tensor", deadline);
      all_gather_rows(comm, sharding, ShardSide::q, local.view(), global.view(), deadline);
      ADD_FAILURE() << "taken";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "rank 1: not a tensor");
    }
  });
}

TEST(ShardTools, PositionsAndLengthsFollowTheDocuments) {
  for_every_sharding([](const SequenceBatch& batch, const CpConfig&, const Sharding& sharding) {
    for (const ShardSide side : {ShardSide::q, ShardSide::kv}) {
      const auto all = places(batch, side);
      for (const Shard& shard : sharding.shards) {
        const auto& chunks = side_of(shard, side);
        const auto rows = global_rows(chunks);
        const auto found = positions(chunks);
        const auto cu_seqlens =
            local_cu_seqlens(static_cast<std::int64_t>(batch.documents.size()), chunks);
        ASSERT_EQ(cu_seqlens.size(), batch.documents.size() + 1);
        EXPECT_EQ(cu_seqlens.back(), num_rows(chunks));
        ASSERT_EQ(found.size(), rows.size());
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const Place& place = all[static_cast<std::size_t>(rows[i])];
          EXPECT_EQ(found[i], place.position);
          const auto document = static_cast<std::size_t>(place.document);
          EXPECT_LE(cu_seqlens[document], static_cast<std::int64_t>(i));
          EXPECT_GT(cu_seqlens[document + 1], static_cast<std::int64_t>(i));
        }
      }
    }
  });
}

TEST(ShardTools, QueryPositionsAreThoseOfTheLastVisibleKey) {
  for_every_sharding([](const SequenceBatch& batch, const CpConfig&, const Sharding& sharding) {
    const auto all = places(batch, ShardSide::q);
    for (const Shard& shard : sharding.shards) {
      const auto rows = global_rows(shard.q);
      const auto found = query_positions(batch, shard.q);
      ASSERT_EQ(found.size(), rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const Place& place = all[static_cast<std::size_t>(rows[i])];
        const Document& document = batch.documents[static_cast<std::size_t>(place.document)];
        EXPECT_EQ(found[i] - document.kv_tokens, place.position - document.q_tokens);
      }
    }
  });
}

TEST(ShardTools, TargetsAreTheNextTokensOfTheDocument) {
  for_every_sharding([](const SequenceBatch& batch, const CpConfig&, const Sharding& sharding) {
    const auto all = places(batch, ShardSide::q);
    std::vector<std::int64_t> tokens;
    for (std::int64_t row = 0; row < batch.q_rows; ++row) tokens.push_back(1000 + row);
    std::int64_t ignored = 0, rows_seen = 0, longer = 0;
    for (const Document& document : batch.documents) longer += document.q_tokens > 0 ? 1 : 0;
    for (const Shard& shard : sharding.shards) {
      const auto rows = global_rows(shard.q);
      const auto targets = next_token_targets(tokens, batch, shard.q, -7);
      ASSERT_EQ(targets.size(), rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i, ++rows_seen) {
        const auto next = static_cast<std::size_t>(rows[i]) + 1;
        const bool has_next = next < all.size() && all[next].document >= 0 &&
                              all[next].document == all[next - 1].document;
        EXPECT_EQ(targets[i], has_next ? tokens[next] : -7) << "row " << rows[i];
        ignored += has_next ? 0 : 1;
      }
    }
    EXPECT_EQ(ignored, longer);  // one for each document that has a token
  });
}

TEST(ShardTools, LeavesCoverEveryRowOnceAndHaveTheSameRowsForEveryCpSize) {
  std::map<std::string, std::map<std::int64_t, std::vector<std::int64_t>>> first_seen;
  for (const auto& [name, batch] : small_batches())
    for (const ShardingKind kind : {ShardingKind::contiguous, ShardingKind::zigzag})
      for (const int world_size : {1, 2, 3, 7}) {
        CpConfig config;
        config.sharding = kind;
        config.chunk_tokens = 5;
        std::map<std::int64_t, std::vector<std::int64_t>> rows_of_leaf;
        std::size_t covered = 0;
        const Sharding sharding = make_sharding(batch, config, world_size);
        for (const Shard& shard : sharding.shards) {
          const auto rows = global_rows(shard.q);
          for (const LeafRows& leaf : leaf_rows(batch, config, world_size, shard.q)) {
            EXPECT_GE(leaf.leaf, 0);
            EXPECT_LT(leaf.leaf, num_leaves(batch, config, world_size));
            EXPECT_EQ(rows_of_leaf.count(leaf.leaf), 0u) << "owned twice";
            rows_of_leaf[leaf.leaf].assign(rows.begin() + leaf.begin,
                                           rows.begin() + leaf.begin + leaf.num_rows);
            covered += static_cast<std::size_t>(leaf.num_rows);
          }
          covered -= rows.size();
        }
        EXPECT_EQ(covered, 0u);
        const auto [place, is_first] = first_seen.emplace(name, rows_of_leaf);
        EXPECT_EQ(place->second, rows_of_leaf) << name << ", CP" << world_size;
      }
}

TEST(ShardTools, LeavesOfDocumentsThatPartsDoNotDivideAreRefused) {
  CpConfig config;
  config.sharding = ShardingKind::dual_chunk;
  for (const std::int64_t tokens : {3, 10})
    EXPECT_THROW(num_leaves(batch_of_one(tokens, tokens), config, 2), InvalidArgument);
}

TEST(ShardTools, AGatherByDifferentShardingsIsRefusedOnEveryRank) {
  const SequenceBatch batch = batch_of_one(64, 64);
  int num_refused = 0;
  std::mutex mutex;
  LoopbackWorld(2).run([&](Communicator& comm) {
    CpConfig config;
    config.chunk_tokens = comm.rank() == 0 ? 8 : 32;
    const Sharding sharding = make_sharding(batch, config, 2);
    const auto& mine = sharding.shards[static_cast<std::size_t>(comm.rank())];
    const HostTensor local(DType::f32, {mine.q_rows, 1, 2});
    HostTensor global(DType::f32, {64, 1, 2});
    try {
      all_gather_rows(comm, sharding, ShardSide::q, local.view(), global.view(),
                      deadline_after(Seconds(30)));
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("sharding_digest differs"), std::string::npos);
      const std::lock_guard lock(mutex);
      ++num_refused;
    }
  });
  EXPECT_EQ(num_refused, 2);
}

// Parts of 10 and 20 tokens at every size here: chunks of 5 never cross their borders.
TEST(ShardTools, LeavesOfAlignedDualChunksAreThoseOfOneRank) {
  const SequenceBatch batch = pack({60, 0, 120});
  CpConfig config;
  config.sharding = ShardingKind::dual_chunk;
  config.chunk_tokens = 5;
  const std::int64_t expected = num_leaves(batch, config, 1);
  EXPECT_EQ(expected, 12 + 24);
  for (const int world_size : {1, 2, 3, 6}) {
    EXPECT_EQ(num_leaves(batch, config, world_size), expected);
    const Sharding sharding = make_sharding(batch, config, world_size);
    std::vector<std::int64_t> first_row(static_cast<std::size_t>(expected), -1);
    for (const Shard& shard : sharding.shards) {
      const auto rows = global_rows(shard.q);
      for (const LeafRows& leaf : leaf_rows(batch, config, world_size, shard.q)) {
        EXPECT_EQ(leaf.num_rows, 5);
        first_row[static_cast<std::size_t>(leaf.leaf)] = rows[static_cast<std::size_t>(leaf.begin)];
      }
    }
    for (std::int64_t leaf = 0; leaf < expected; ++leaf)
      EXPECT_EQ(first_row[static_cast<std::size_t>(leaf)], 5 * leaf);
  }
}

TEST(ShardTools, WhatDoesNotFitIsRefused) {
  const SequenceBatch batch = batch_of_one(20, 20);
  CpConfig config;
  config.chunk_tokens = 5;
  const std::vector<OwnedChunk> own = make_sharding(batch, config, 2).shards[0].q;
  const HostTensor global = numbered(DType::f32, {20, 2, 3});
  const auto refused = [&](auto&& change) {
    HostTensor local(DType::f32, {num_rows(own), 2, 3});
    AnyConstTensor from = global.view();
    AnyTensor to = local.view();
    change(from, to);
    try {
      shard_rows(from, own, to);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused([](AnyConstTensor&, AnyTensor&) {}), "");
  EXPECT_EQ(refused([](AnyConstTensor& from, AnyTensor&) { from.shape[0] = 19; }),
            "global: 19 rows, expected at least 20");
  EXPECT_EQ(refused([](AnyConstTensor&, AnyTensor& to) { to.shape[0] = 9; }),
            "local: 9 rows, expected 10");
  EXPECT_EQ(refused([](AnyConstTensor&, AnyTensor& to) { to.dtype = DType::f16; }),
            "local: f16, but global is f32");
  EXPECT_EQ(refused([](AnyConstTensor&, AnyTensor& to) { to.shape[2] = 2; }),
            "local: dimension 2 is 2, but that of global is 3");
  EXPECT_EQ(refused([](AnyConstTensor& from, AnyTensor&) { from.strides[2] = 2; }),
            "global: last stride 2, expected 1");
  EXPECT_EQ(refused([](AnyConstTensor&, AnyTensor& to) { to.data = nullptr; }), "local: null");
  const std::vector<std::int64_t> few(19);
  EXPECT_THROW(next_token_targets(few, batch, own), InvalidArgument);
  EXPECT_THROW(shard_values(std::span<const std::int64_t>(few), own), InvalidArgument);
  EXPECT_THROW(local_cu_seqlens(0, own), InvalidArgument);
  EXPECT_THROW(query_positions({}, own), InvalidArgument);
}

}  // namespace
}  // namespace cpattn::testing
