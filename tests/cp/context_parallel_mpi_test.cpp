#include "src/comm/mpi_comm.h"
#include "tests/cp/context_parallel_contract.h"

namespace cpattn::testing {
namespace {

CommWorld mpi_world() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto run = [](const RankBody& body) {
    MpiCommunicator comm;
    body(comm);
  };
  return {.name = "mpi", .size = size, .run = run, .run_broken = run};
}

/// Called by InitGoogleTest(), which mpi_main.cpp calls after MPI_Init.
INSTANTIATE_TEST_SUITE_P(Mpi, ContextParallel, ::testing::Values(mpi_world()), world_name);

/// The ranks of `color`, as a group.
std::shared_ptr<Communicator> group_of(int color, int key) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, key, &part);
  auto group = std::make_shared<MpiCommunicator>(part);
  MPI_Comm_free(&part);  // the group has a duplicate of its own
  return group;
}

// A group is a property of a handle. Groups of other sizes, and the same ranks in another order,
// take turns, and each call is that of its own group: the next one finds nothing of the last.
TEST(ContextParallelGroups, TakeTurnsAndNeverLeak) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const OneLayer on_all = packed_layer(1), on_half = packed_layer(2), on_reversed = packed_layer(3),
                 alone = packed_layer(4);
  const auto world = group_of(0, rank), half = group_of(rank % 2, rank),
             reversed = group_of(0, -rank), self = group_of(rank, 0);
  const auto planned = [](const OneLayer& layer, const std::shared_ptr<Communicator>& group) {
    return ContextParallelAttention(group, layer.problem().config).plan(layer.stated());
  };
  const auto plan_all = planned(on_all, world), plan_half = planned(on_half, half),
             plan_reversed = planned(on_reversed, reversed), plan_alone = planned(alone, self);
  EXPECT_EQ(plan_alone->plan().world_size(), 1);
  for (int i = 0; i < 3; ++i) {
    on_all.run(*plan_all);
    on_half.run(*plan_half);
    alone.run(*plan_alone);
    on_reversed.run(*plan_reversed);
    on_half.run(*plan_half);
  }
}

}  // namespace
}  // namespace cpattn::testing
