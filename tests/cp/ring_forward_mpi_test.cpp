// The same claim over MPI processes: each rank compares its rows with a single-rank run of its own.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "src/comm/mpi_comm.h"
#include "tests/support/attend.h"
#include "tests/support/batches.h"
#include "tests/support/compare.h"

namespace cpattn::testing {
namespace {

/// Runs this rank's part and returns it in global rows; rows of other ranks stay NaN.
void expect_own_rows(const AttentionCase& problem, const Attended& expected, Communicator& comm) {
  const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), comm.size());
  RankTensors tensors(problem, plan.shard());
  RingAttention attention(plan, comm);
  for (int i = 0; i < 2; ++i) attention.forward(tensors.views());

  const std::vector<std::int64_t> rows = global_rows(plan.shard().q);
  EXPECT_TRUE(bits_equal(tensors.out, expected.out.rows(rows)));
  const auto heads = static_cast<std::size_t>(problem.shape.num_heads);
  std::vector<float> lse;
  for (const std::int64_t row : rows)
    for (std::size_t h = 0; h < heads; ++h)
      lse.push_back(expected.lse[static_cast<std::size_t>(row) * heads + h]);
  EXPECT_TRUE(bits_equal(tensors.lse, lse));
  EXPECT_EQ(attention.stats().hops, 2 * (num_ring_steps(plan.reach()) - 1));
}

TEST(RingForwardMpi, EveryRankGetsTheBitsOfOneRank) {
  MpiCommunicator comm;
  int compared = 0;
  for (const NamedBatch& named : small_batches())
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
        AttentionCase problem =
            make_random_case(make_shape(4, 2, 12, 9), named.batch, test_config(mask, 8), dtype, 1);
        const Attended expected = attend(problem);
        for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
          for (const std::int64_t shuffle : {0, 2}) {
            if (shuffle != 0 && dtype != DType::f32) continue;  // each hop is held up, on purpose
            problem.config.sharding = sharding;
            problem.config.shuffle_arrival = shuffle;
            SCOPED_TRACE(named.name + " " + std::string(name_of(dtype)) + " " +
                         std::string(name_of(mask)) + " " + std::string(name_of(sharding)));
            expect_own_rows(problem, expected, comm);
            ++compared;
          }
      }
  EXPECT_GT(compared, 100);
}

TEST(RingForwardMpi, MessagesInPieces) {
  MpiCommunicator comm({.max_message_bytes = 1000});
  AttentionCase problem = make_random_case(make_shape(4, 2, 32, 32), batch_of_one(300, 300),
                                           test_config(MaskKind::causal, 32), DType::f32, 2);
  problem.config.verify_checksum = true;
  problem.config.max_message_bytes = 1000;
  expect_own_rows(problem, attend(problem), comm);
}

TEST(RingForwardMpi, ADifferingKnobIsNamedOnEveryRank) {
  MpiCommunicator comm;
  const AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), batch_of_one(40, 40),
                                                 test_config(MaskKind::causal, 8), DType::f32, 1);
  CpConfig config = problem.config;
  if (comm.rank() == comm.size() - 1) config.sharding = ShardingKind::contiguous;
  const Plan plan(problem_of(problem), config, default_kernels(), comm.rank(), comm.size());
  std::string told;
  try {
    RingAttention attention(plan, comm);
  } catch (const InvalidArgument& error) {
    told = error.what();
  }
  if (comm.size() == 1) {
    EXPECT_EQ(told, "");
  } else {
    EXPECT_NE(told.find("sharding"), std::string::npos) << told;
  }
}

}  // namespace
}  // namespace cpattn::testing
