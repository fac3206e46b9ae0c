// The claim for gradients over MPI processes: each rank compares its rows with a single-rank run of
// its own.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/comm/mpi_comm.h"
#include "tests/support/attend_backward.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

/// Runs this rank's part twice and compares it with the same rows of `expected`.
void expect_own_rows(const AttentionCase& problem, const Upstream& upstream,
                     const Gradients& expected, Communicator& comm) {
  const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), comm.size());
  const GradientPlan gradient(plan);
  RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
  RingAttention(plan, comm).forward(tensors.forward.views());
  RingGradient backward(plan, gradient, comm);
  for (int i = 0; i < 2; ++i) backward.backward(tensors.views());

  const auto q_rows = global_rows(plan.shard().q), kv_rows = global_rows(plan.shard().kv);
  EXPECT_TRUE(
      same({tensors.dq, tensors.dk, tensors.dv},
           {expected.dq.rows(q_rows), expected.dk.rows(kv_rows), expected.dv.rows(kv_rows)}));
  EXPECT_EQ(backward.ring_stats().hops, 2 * (num_ring_steps(plan.reach()) - 1));
  EXPECT_EQ(backward.piece_stats().hops, backward.ring_stats().hops);
  EXPECT_EQ(backward.ring_stats().bytes_sent + backward.piece_stats().bytes_sent,
            2 * gradient.bytes_on_wire());
}

TEST(RingBackwardMpi, EveryRankGetsTheBitsOfOneRank) {
  MpiCommunicator comm;
  int compared = 0;
  for (const NamedBatch& named : small_batches())
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
        AttentionCase problem =
            make_random_case(make_shape(4, 2, 12, 9), named.batch, test_config(mask, 8), dtype, 1);
        const Upstream upstream = random_upstream(problem, 1);
        const Gradients expected = differentiate(problem, upstream);
        for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
          for (const std::int64_t shuffle : {0, 2}) {
            if (shuffle != 0 && dtype != DType::f32) continue;  // each hop is held up, on purpose
            problem.config.sharding = sharding;
            problem.config.shuffle_arrival = shuffle;
            SCOPED_TRACE(named.name + " " + std::string(name_of(dtype)) + " " +
                         std::string(name_of(mask)) + " " + std::string(name_of(sharding)));
            expect_own_rows(problem, upstream, expected, comm);
            ++compared;
          }
      }
  EXPECT_GT(compared, 100);
}

TEST(RingBackwardMpi, MessagesInPieces) {
  MpiCommunicator comm({.max_message_bytes = 1000});
  AttentionCase problem = make_random_case(make_shape(4, 2, 32, 32), batch_of_one(288, 288),
                                           test_config(MaskKind::causal, 12), DType::f32, 2);
  problem.config.verify_checksum = true;
  problem.config.max_message_bytes = 1000;
  const Upstream upstream = random_upstream(problem, 2);
  const Gradients expected = differentiate(problem, upstream);
  for (const ShardingKind sharding : {ShardingKind::zigzag, ShardingKind::dual_chunk}) {
    problem.config.sharding = sharding;  // dual_chunk: parts of 72, 48 and 36 tokens
    expect_own_rows(problem, upstream, expected, comm);
  }
}

TEST(RingBackwardMpi, OneRanksWrongTensorsAreRefusedOnEveryRank) {
  MpiCommunicator comm;
  const AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), batch_of_one(40, 40),
                                                 test_config(MaskKind::causal, 8), DType::f32, 1);
  const Upstream upstream = random_upstream(problem, 1);
  const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), comm.size());
  const GradientPlan gradient(plan);
  RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
  RingAttention(plan, comm).forward(tensors.forward.views());
  RingGradient backward(plan, gradient, comm);
  BackwardTensors views = tensors.views();
  if (comm.rank() == comm.size() - 1) views.dv.shape[1] = 2;
  try {
    backward.backward(views);
    ADD_FAILURE() << "taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).find("rank " + std::to_string(comm.size() - 1) + ": dv: "),
              0u)
        << error.what();
  }
  backward.backward(tensors.views());
}

}  // namespace
}  // namespace cpattn::testing
