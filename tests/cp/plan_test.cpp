#include "cp/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

Problem small_problem() {
  return {.shape = {4, 2, 16, 24, 0.25},
          .batch = pack({31, 0, 7, 64, 1}),
          .dtype = DType::bf16,
          .out_dtype = DType::f32};
}
CpConfig small_config() {
  CpConfig config;
  config.chunk_tokens = 8;
  config.threads = 1;
  return config;
}

std::string refusal(const Problem& problem, const CpConfig& config, int rank = 0,
                    int world_size = 2) {
  try {
    Plan(problem, config, default_kernels(), rank, world_size);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

#define EXPECT_NAMES(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Plan, EveryProblemIsNamedAtOnce) {
  Problem problem = small_problem();
  CpConfig config = small_config();
  problem.shape.num_heads = 5;
  problem.shape.head_dim = 300;
  config.chunk_tokens = 0;
  config.timeout_seconds = -1.0;
  const std::string text = refusal(problem, config);
  EXPECT_NAMES(text, "num_heads");
  EXPECT_NAMES(text, "head_dim");
  EXPECT_NAMES(text, "chunk_tokens");
  EXPECT_NAMES(text, "timeout");
}

TEST(Plan, DocumentsAndRanksAreChecked) {
  Problem problem = small_problem();
  problem.batch.documents[1] = {30, 2, 31, 0};
  EXPECT_NAMES(refusal(problem, small_config()), "overlap");
  EXPECT_NAMES(refusal(small_problem(), small_config(), 2, 2), "rank");
  EXPECT_NAMES(refusal(small_problem(), small_config(), -1, 2), "rank");
  EXPECT_NAMES(refusal(small_problem(), small_config(), 0, 0), "world_size");
}

// Lengths out of memory that nobody wrote to: refused at once, by name, with nothing allocated.
TEST(Plan, SizesThatOverflowAreRefused) {
  Problem problem = small_problem();
  CpConfig config = small_config();
  for (const std::int64_t tokens : {std::int64_t{1} << 44, std::int64_t{1} << 61, INT64_MAX}) {
    for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag}) {
      config.sharding = sharding;
      config.chunk_tokens = 512;
      problem.batch = batch_of_one(tokens, tokens);
      EXPECT_NAMES(refusal(problem, config), "chunk_tokens 512");
      EXPECT_NAMES(refusal(problem, config), "(query, key) pairs");
      problem.batch = batch_of_one(0, tokens);
      EXPECT_NAMES(refusal(problem, config), "chunk_tokens 512");
      problem.batch.documents.clear();
      EXPECT_NAMES(refusal(problem, config), "kv_rows");
    }
  }
  problem = small_problem();
  problem.shape.num_heads = std::int64_t{1} << 60;
  EXPECT_NAMES(refusal(problem, config), "num_heads");
  // 2^31 tokens on 8 ranks, in chunks of which there are few, are a plan.
  problem = small_problem();
  problem.batch = batch_of_one(std::int64_t{1} << 31, std::int64_t{1} << 31);
  config.chunk_tokens = 1 << 24;
  EXPECT_EQ(refusal(problem, config, 0, 8), "nothing was refused");
}

TEST(Plan, SpansHoldTheOwnersChunksWithoutOverlap) {
  const Problem problem = small_problem();
  for (const int world_size : {1, 2, 3, 8})
    for (int rank = 0; rank < world_size; ++rank) {
      const Plan plan(problem, small_config(), default_kernels(), rank, world_size);
      for (int owner = 0; owner < world_size; ++owner) {
        const auto& chunks = plan.sharding().shards[static_cast<std::size_t>(owner)].kv;
        const auto& placed = plan.ring().chunks(owner);
        ASSERT_EQ(placed.size(), chunks.size());
        std::size_t bytes = 0;
        std::int64_t keys = 0;
        for (std::size_t i = 0; i < chunks.size(); ++i) {
          EXPECT_EQ(placed[i].offset % 64, 0u);
          EXPECT_EQ(placed[i].num_keys, chunks[i].num_tokens);
          bytes += plan.kernels().packed_kv_bytes(plan.kernel_problem(), chunks[i].num_tokens);
          keys += chunks[i].num_tokens;
        }
        EXPECT_EQ(plan.ring().span_bytes()[static_cast<std::size_t>(owner)], bytes);
        EXPECT_GE(plan.limits().keys, keys);
        EXPECT_GE(plan.limits().blocks, static_cast<std::int64_t>(chunks.size()));
      }
      EXPECT_EQ(plan.memory().ring_slots, RingExchange::workspace_bytes(plan.ring().bytes()));
    }
}

TEST(Plan, RanksAgreeOnEverythingThatMatters) {
  const Problem problem = small_problem();
  const auto lines = [&](const Problem& p, const CpConfig& c, int rank) {
    return Plan(p, c, default_kernels(), rank, 3).agreement_lines();
  };
  const std::string expected = lines(problem, small_config(), 0);
  EXPECT_EQ(lines(problem, small_config(), 1), expected);
  EXPECT_EQ(lines(problem, small_config(), 2), expected);

  CpConfig threads = small_config();
  threads.threads = 2;
  EXPECT_EQ(lines(problem, threads, 0), expected) << "threads may differ between ranks";

  const auto differs = [&](const std::function<void(Problem&, CpConfig&)>& change) {
    Problem changed = problem;
    CpConfig config = small_config();
    change(changed, config);
    EXPECT_NE(lines(changed, config, 0), expected);
  };
  differs([](Problem&, CpConfig& c) { c.mask = MaskKind::full; });
  differs([](Problem&, CpConfig& c) { c.sharding = ShardingKind::contiguous; });
  differs([](Problem&, CpConfig& c) { c.schedule = ScheduleKind::arrival; });
  differs([](Problem&, CpConfig& c) { c.chunk_tokens = 16; });
  differs([](Problem&, CpConfig& c) { c.timeout_seconds = 61; });
  differs([](Problem&, CpConfig& c) { c.max_message_bytes = 64; });
  differs([](Problem&, CpConfig& c) { c.verify_checksum = true; });
  differs([](Problem&, CpConfig& c) { c.shuffle_arrival = 5; });
  differs([](Problem& p, CpConfig&) { p.shape.num_heads = 2; });
  differs([](Problem& p, CpConfig&) { p.shape.value_dim = 16; });
  differs([](Problem& p, CpConfig&) { p.shape.softmax_scale = 0.250001; });
  differs([](Problem& p, CpConfig&) { p.dtype = DType::f16; });
  differs([](Problem& p, CpConfig&) { p.out_dtype = DType::f16; });
  differs([](Problem& p, CpConfig&) { p.batch = pack({31, 0, 8, 63, 1}); });

  // The same arithmetic, but what travels has another form.
  KernelTable elsewhere = default_kernels();
  elsewhere.device = DeviceKind::cuda;
  EXPECT_NE(Plan(problem, small_config(), elsewhere, 0, 3).agreement_lines(), expected);
}

TEST(Plan, TheGuaranteeIsStated) {
  CpConfig config = small_config();
  EXPECT_EQ(Plan(small_problem(), config, default_kernels(), 0, 2).guarantee(),
            "bitwise across CP sizes");
  config.schedule = ScheduleKind::arrival;
  EXPECT_NE(Plan(small_problem(), config, default_kernels(), 0, 2).guarantee(),
            "bitwise across CP sizes");
}

TEST(Plan, ForeignShardsGetTheGuaranteeTheirBordersAllow) {
  Problem problem = small_problem();
  problem.batch = pack({64, 0, 96});
  CpConfig config = small_config();
  config.sharding = ShardingKind::dual_chunk;
  const auto guarantee = [&](int world_size) {
    return Plan(problem, config, default_kernels(), 0, world_size).guarantee();
  };
  EXPECT_EQ(guarantee(1), kBitwise);
  EXPECT_EQ(guarantee(2), kBitwise);  // parts of 16 and 24 tokens, chunks of 8
  EXPECT_EQ(guarantee(4),             // parts of 8 and 12
            "bitwise for CP size 4 only: shard borders do not meet chunk borders (document 2: "
            "parts of 12 tokens, chunk_tokens 8)");
  EXPECT_NAMES(refusal(problem, config, 0, 3), "document 0: 64 query and 64 key tokens");
}

TEST(Plan, MemoryIsLinearInTheShard) {
  for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
    for (const int world_size : {1, 2, 4}) {
      CpConfig config = small_config();
      config.chunk_tokens = 64;
      config.schedule = schedule;
      const auto total = [&](std::int64_t tokens) {
        std::size_t most = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const Problem problem{.shape = {4, 2, 64, 64, 0.125},
                                .batch = batch_of_one(tokens, tokens)};
          const MemoryPlan memory =
              Plan(problem, config, default_kernels(), rank, world_size).memory();
          most = std::max(most, memory.total());
        }
        return static_cast<double>(most);
      };
      // Twice the tokens take twice the memory, and one more level of pending states at most.
      EXPECT_LE(total(16384) / total(8192), 2.2) << world_size;
      EXPECT_LE(total(32768) / total(16384), 2.2) << world_size;
    }
}

TEST(Plan, MemoryCountsWhatTheTensorsTake) {
  const Problem problem = small_problem();
  std::size_t inputs = 0, outputs = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const MemoryPlan memory = Plan(problem, small_config(), default_kernels(), rank, 3).memory();
    inputs += memory.inputs;
    outputs += memory.outputs;
    EXPECT_EQ(memory.total(), memory.inputs + memory.outputs + memory.ring_slots + memory.carried +
                                  memory.workspace);
  }
  const std::size_t tokens = 103;
  EXPECT_EQ(inputs, tokens * (4 * 16 + 2 * 16 + 2 * 24) * 2);
  EXPECT_EQ(outputs, tokens * 4 * (24 * 4 + 4));
}

}  // namespace
}  // namespace cpattn::testing
