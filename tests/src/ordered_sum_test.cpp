#include "src/comm/ordered_sum.h"

#include "src/comm/self_comm.h"
#include "tests/src/loopback_worlds.h"
#include "tests/src/ordered_sum_contract.h"

namespace cpattn {
namespace {

INSTANTIATE_TEST_SUITE_P(Loopback, OrderedSumContract,
                         ::testing::ValuesIn(loopback_worlds({1, 2, 3, 4, 7})), world_name);

// Else the tests of the contract could not fail.
TEST(OrderedSum, TheOrderMattersForTheBitsOfItsTests) {
  const std::vector<bool> present(37, true);
  std::vector<float> ascending(64, 0.0f);
  for (std::int64_t leaf = 0; leaf < 37; ++leaf) {
    const auto values = leaf_values<float>(leaf, 64);
    for (std::size_t i = 0; i < ascending.size(); ++i) ascending[i] += values[i];
  }
  EXPECT_FALSE(same_bits(ascending, expected_sum<float>(present, 64)));
}

TEST(OrderedSum, RefusesNegativeSizes) {
  EXPECT_THROW(OrderedSum<float>(-1, 1), InvalidArgument);
  EXPECT_THROW(OrderedSum<float>(1, -1), InvalidArgument);
}

TEST(OrderedSum, HoldsAsManyLeavesAsItSays) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  EXPECT_THROW(OrderedSum<float>(kMost + 1, 1), InvalidArgument);
  SelfCommunicator comm;
  OrderedSum<float> sum(kMost, 1);
  const float first = 1.0f, last = 2.0f;
  sum.add(0, {&first, 1});
  sum.add(kMost - 1, {&last, 1});
  float result = 0.0f;
  sum.all_reduce(comm, {&result, 1}, soon());
  EXPECT_EQ(result, 3.0f);
}

// A rank that never comes ends the wait of the others.
TEST(OrderedSum, ALateRankEndsInCommError) {
  LoopbackWorld world(2, {.must_receive_all = false});
  EXPECT_THROW(world.run([](Communicator& comm) {
    if (comm.rank() == 1) return;
    OrderedSum<float> sum(1, 1);
    std::vector<float> result(1);
    sum.all_reduce(comm, result, deadline_after(Seconds(0.05)));
  }),
               CommError);
}

TEST(OrderedSum, OneRankNeedsNoTransport) {
  SelfCommunicator comm;
  OrderedSum<double> sum(3, 2);
  for (const std::int64_t leaf : {0, 1, 2}) sum.add(leaf, leaf_values<double>(leaf, 2));
  std::vector<double> result(2);
  sum.all_reduce(comm, result, soon());
  EXPECT_TRUE(same_bits(result, expected_sum<double>({true, true, true}, 2)));
}

}  // namespace
}  // namespace cpattn
