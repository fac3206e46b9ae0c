#include "cp/context_parallel.h"

#include <thread>

#include "src/comm/self_comm.h"
#include "tests/cp/context_parallel_contract.h"
#include "tests/src/loopback_worlds.h"

namespace cpattn::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Loopback, ContextParallel,
                         ::testing::ValuesIn(loopback_worlds({1, 2, 3, 4})), world_name);

TEST(ContextParallelAttention, NeedsAGroup) {
  EXPECT_THROW(ContextParallelAttention(nullptr, {}), InvalidArgument);
  EXPECT_THROW(PlannedAttention(nullptr, {}, default_kernels(), {}), InvalidArgument);
}

TEST(ContextParallelAttention, ExplainsEveryReasonAndDoesNotThrow) {
  CpConfig config;
  config.chunk_tokens = 0;
  config.threads = -1;
  const ContextParallelAttention attention(std::make_shared<SelfCommunicator>(), config);
  Problem problem{.shape = make_shape(6, 4, 8, 300), .batch = batch_of_one(4, 4)};
  problem.batch.documents.push_back({2, 4, 0, 2});  // past the end, and over the first
  const Explanation told = attention.explain(problem);
  EXPECT_FALSE(told.is_supported);
  EXPECT_EQ(told.guarantee, "");
  std::string all;
  for (const std::string& reason : told.refusals) all += reason + "\n";
  for (const char* field : {"num_heads", "value_dim", "chunk_tokens", "threads", "document"})
    EXPECT_NE(all.find(field), std::string::npos) << field << " is not in " << all;
  EXPECT_GE(told.refusals.size(), 4u);
}

TEST(ContextParallelAttention, ExplainsALayoutThatCannotBe) {
  CpConfig config;
  config.sharding = ShardingKind::dual_chunk;
  LoopbackWorld(2).run([&](Communicator& comm) {
    const ContextParallelAttention attention(borrowed(comm), config);
    const Explanation told = attention.explain({.shape = {}, .batch = batch_of_one(10, 10)});
    EXPECT_FALSE(told.is_supported);
    ASSERT_EQ(told.refusals.size(), 1u);
    EXPECT_NE(told.refusals[0].find("dual_chunk"), std::string::npos) << told.refusals[0];
    EXPECT_TRUE(attention.explain({.shape = {}, .batch = batch_of_one(12, 12)}).is_supported);
  });
}

TEST(Explanation, IsOneJsonObject) {
  Explanation told;
  told.is_supported = true;
  told.refusals = {"a \"quoted\"\nline", "b\\c"};
  told.world_size = 2;
  told.kernels = "cpu/avx2";
  told.forward_memory_bytes = 4096;
  EXPECT_EQ(told.to_json(),
            R"({"is_supported": true, "refusals": ["a \"quoted\"\u000aline", "b\\c"], "rank": 0, )"
            R"("world_size": 2, "kernels": "cpu/avx2", "numerics": "", "transport": "", )"
            R"("sharding": "", "schedule": "", "guarantee": "", "q_rows": 0, "kv_rows": 0, )"
            R"("visible_pairs": 0, "forward_memory_bytes": 4096, "backward_memory_bytes": 0, )"
            R"("forward_bytes_on_wire": 0, "backward_bytes_on_wire": 0})");
}

// Nothing is shared between handles: unlike problems on two threads, and on groups of other sizes.
TEST(BC_086, TwoThreadsWithTwoHandles) {
  const OneLayer one = packed_layer(1), two = packed_layer(2);
  const auto repeat = [](const OneLayer& layer, std::shared_ptr<Communicator> group) {
    const ContextParallelAttention attention(std::move(group), layer.problem().config);
    const auto planned = attention.plan(layer.stated());
    for (int i = 0; i < 200; ++i) {
      layer.run(*planned);
      if (::testing::Test::HasFailure()) return;
    }
  };
  std::jthread alone([&] { repeat(one, std::make_shared<SelfCommunicator>()); });
  std::jthread pair(
      [&] { LoopbackWorld(2).run([&](Communicator& comm) { repeat(two, borrowed(comm)); }); });
}

}  // namespace
}  // namespace cpattn::testing
