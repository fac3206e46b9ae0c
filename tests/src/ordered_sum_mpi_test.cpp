#include "src/comm/mpi_comm.h"
#include "tests/src/ordered_sum_contract.h"

namespace cpattn {
namespace {

CommWorld mpi_world() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto run = [](const RankBody& body) {
    MpiCommunicator comm({.max_message_bytes = 4096});
    body(comm);
  };
  return {.name = "mpi", .size = size, .run = run, .run_broken = run};
}

/// Called by InitGoogleTest(), which mpi_main.cpp calls after MPI_Init.
INSTANTIATE_TEST_SUITE_P(Mpi, OrderedSumContract, ::testing::Values(mpi_world()), world_name);

}  // namespace
}  // namespace cpattn
