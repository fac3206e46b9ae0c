#include "src/comm/mpi_comm.h"

#include <climits>

#include "tests/src/communicator_contract.h"
#include "tests/src/direct_exchange_contract.h"
#include "tests/src/ring_exchange_contract.h"

namespace cpattn {
namespace {

CommWorld mpi_world(const std::string& name, std::size_t max_message_bytes) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto run = [=](const RankBody& body) {
    MpiCommunicator comm({.max_message_bytes = max_message_bytes});
    body(comm);
  };
  return {.name = name, .size = size, .run = run, .run_broken = run};
}

/// Called by InitGoogleTest(), which mpi_main.cpp calls after MPI_Init.
std::vector<CommWorld> mpi_worlds() {
  return {mpi_world("mpi", MpiOptions{}.max_message_bytes), mpi_world("mpi_cut_1KiB", 1024)};
}

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorContract, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, BC_079, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, RingContract, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, BC_069, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, BC_071, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, BC_072, testing::ValuesIn(mpi_worlds()), world_name);
INSTANTIATE_TEST_SUITE_P(Mpi, DirectContract, testing::ValuesIn(mpi_worlds()), world_name);

TEST(MpiCommunicator, RefusesLimitsAnMpiCountCannotHold) {
  const MpiOptions none{.max_message_bytes = 0};
  const MpiOptions too_long{.max_message_bytes = std::size_t{INT_MAX} + 1};
  EXPECT_THROW(MpiCommunicator(MPI_COMM_WORLD, none), InvalidArgument);
  EXPECT_THROW(MpiCommunicator(MPI_COMM_WORLD, too_long), InvalidArgument);
}

TEST(MpiCommunicator, KnowsItsPlaceOnTheNode) {
  const MpiCommunicator comm;
  const NodePlace place = comm.node_place();
  EXPECT_EQ(place.size, comm.size()) << "these tests run on one machine";
  EXPECT_EQ(place.rank, comm.rank());
}

TEST(MpiCommunicator, TwoOnTheSameRanksDoNotMix) {
  MpiCommunicator one, two;
  std::vector<std::byte> from_one(100), from_two(100);
  const auto sent_one = pattern(one.rank(), 1, 100), sent_two = pattern(two.rank(), 2, 100);
  Pending receive_two = two.irecv(from_two, previous_of(two), Tag::test);
  Pending receive_one = one.irecv(from_one, previous_of(one), Tag::test);
  Pending send_one = one.isend(sent_one, next_of(one), Tag::test);
  Pending send_two = two.isend(sent_two, next_of(two), Tag::test);
  one.wait(receive_one, soon(), {.what = "one"});
  two.wait(receive_two, soon(), {.what = "two"});
  one.wait(send_one, soon(), {.what = "one"});
  two.wait(send_two, soon(), {.what = "two"});
  EXPECT_EQ(from_one, pattern(previous_of(one), 1, 100));
  EXPECT_EQ(from_two, pattern(previous_of(two), 2, 100));
}

// 10,007 bytes with a limit of 1 KiB: ten pieces each way, the last of 791 bytes.
TEST(BC_078, MessagesAreCutAtTheLimit) {
  MpiCommunicator comm({.max_message_bytes = 1024});
  struct Case {
    std::size_t bytes;
    std::int64_t pieces;
  };
  for (const Case& at :
       {Case{10007, 10}, Case{1024, 1}, Case{1025, 2}, Case{0, 1}, Case{10240, 10}}) {
    const std::int64_t before = comm.num_mpi_messages();
    const auto received = pass_on(comm, pattern(comm.rank(), 0, at.bytes), at.bytes);
    EXPECT_EQ(comm.num_mpi_messages() - before, 2 * at.pieces) << at.bytes;
    EXPECT_EQ(received, pattern(previous_of(comm), 0, at.bytes)) << at.bytes;
  }
}

// A ring whose every hop is cut, on the same header and checksum as an uncut one.
TEST(BC_078, ACutRingDeliversTheSameBytes) {
  MpiCommunicator comm({.max_message_bytes = 1024});
  expect_ring_delivers(comm, std::vector<std::size_t>(comm.size(), 10007),
                       {.verify_checksum = true}, 2);
}

// Groups {0, 2} and {1, 3}: ranks and messages are those of the group.
TEST(BC_007, SubgroupsDoNotCrossTalk) {
  const MpiCommunicator world;
  const int group = world.rank() % 2;
  const auto comm = world.split(group, world.rank());
  EXPECT_EQ(comm->size(), (world.size() + 1 - group) / 2);
  EXPECT_EQ(comm->rank(), world.rank() / 2);

  RingExchange exchange(*comm, std::vector<std::size_t>(comm->size(), 64),
                        {.verify_checksum = true});
  const auto span_of = [&](int group_rank) { return pattern(group_rank, 100 * (group + 1), 64); };
  const auto mine = span_of(comm->rank());
  std::copy(mine.begin(), mine.end(), exchange.own().begin());
  for (int step = 0; step < comm->size(); ++step) {
    exchange.post();
    exchange.wait();
    EXPECT_TRUE(equals(exchange.current(), span_of(exchange.current_owner())));
  }
  agree(*comm, "group=" + std::to_string(group), soon());  // differs between groups, not within
}

TEST(BC_007, GroupsCanReverseTheirOrder) {
  const MpiCommunicator world;
  const auto comm = world.split(0, -world.rank());
  EXPECT_EQ(comm->rank(), world.size() - 1 - world.rank());
  const std::int64_t mine = world.rank();
  const auto all = comm->all_gather(std::as_bytes(std::span(&mine, 1)), soon(), "reversed");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::int64_t expected = world.size() - 1 - static_cast<std::int64_t>(rank);
    EXPECT_TRUE(equals(std::as_bytes(std::span(&expected, 1)), all[rank]));
  }
}

}  // namespace
}  // namespace cpattn
