#include "src/comm/loopback_comm.h"

#include <atomic>

#include "tests/src/communicator_contract.h"
#include "tests/src/loopback_worlds.h"

namespace cpattn {
namespace {

const auto kWorlds = testing::ValuesIn(loopback_worlds({1, 2, 3, 4, 7}));
INSTANTIATE_TEST_SUITE_P(Loopback, CommunicatorContract, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Loopback, BC_079, kWorlds, world_name);

/// What waits end by when they should have been ended by a failure.
constexpr Seconds kFar{60};
constexpr Seconds kPrompt{10};

/// Waits for a message that never comes.
void wait_for_nothing(Communicator& comm) {
  Buffer bytes(8);
  Pending pending = comm.irecv(bytes.bytes(), comm.rank(), Tag::test);
  comm.wait(pending, deadline_after(kFar), {.what = "nothing", .peer = comm.rank()});
}

TEST(LoopbackWorld, RefusesToBeEmpty) { EXPECT_THROW(LoopbackWorld(0), InvalidArgument); }

TEST(LoopbackWorld, AFailureEndsTheOthersAndIsTheOneRethrown) {
  for (int failing = 0; failing < 4; ++failing) {
    LoopbackWorld world(4);
    std::atomic<int> num_ended = 0;
    const Clock::time_point started = Clock::now();

    const std::string text = text_thrown_by<std::out_of_range>([&] {
      world.run([&](Communicator& comm) {
        if (comm.rank() == failing) throw std::out_of_range("row 12");
        const std::string other = text_thrown_by<CommError>([&] { wait_for_nothing(comm); });
        EXPECT_EQ(other, "rank " + std::to_string(comm.rank()) + ": rank " +
                             std::to_string(failing) + " failed: row 12");
        ++num_ended;
        throw CommError("consequence");
      });
    });

    EXPECT_EQ(text, "row 12");
    EXPECT_EQ(num_ended, 3);
    EXPECT_LT(Seconds(Clock::now() - started), kPrompt);
  }
}

TEST(LoopbackWorld, AbortEndsTheOthersWithItsReason) {
  LoopbackWorld world(3);
  const std::string text = text_thrown_by<CommError>([&] {
    world.run([&](Communicator& comm) {
      if (comm.rank() == 1) return comm.abort(3, "no device");
      wait_for_nothing(comm);
    });
  });
  EXPECT_NE(text.find("rank 1 aborted with exit code 3: no device"), std::string::npos) << text;
}

TEST(LoopbackWorld, CanRunAgainAfterAFailure) {
  LoopbackWorld world(2);
  EXPECT_THROW(world.run([](Communicator& comm) {
    if (comm.rank() == 0) {
      const std::byte byte{1};
      std::ignore = comm.isend({&byte, 1}, 1, Tag::test);
      throw Unsupported("x");
    }
  }),
               Unsupported);

  int num_ranks = 0;
  world.run([&](Communicator& comm) {
    comm.barrier(soon(), "again");
    if (comm.rank() == 0) num_ranks = comm.size();
  });
  EXPECT_EQ(num_ranks, 2);
}

TEST(LoopbackWorld, AMessageNobodyReceivedIsReported) {
  LoopbackWorld world(3);
  const std::string text = text_thrown_by<InternalError>([&] {
    world.run([](Communicator& comm) {
      if (comm.rank() == 2) std::ignore = comm.isend({}, 1, Tag::test);
    });
  });
  EXPECT_EQ(text, "internal error: 1 messages of rank 2 to rank 1, tag 4, were never received");
}

TEST(LoopbackWorld, AnotherThreadsErrorTypeSurvives) {
  LoopbackWorld world(2);
  EXPECT_THROW(world.run([](Communicator&) { throw 7; }), int);
}

TEST(LoopbackWorld, ShufflingLetsChannelsOvertakeEachOther) {
  int num_overtaken = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    LoopbackWorld world(1, {.shuffle_seed = seed});
    world.run([&](Communicator& comm) {
      std::vector<std::byte> first(1), second(1), sent(1);
      Pending send_first = comm.isend(sent, 0, Tag::ring_header);
      Pending send_second = comm.isend(sent, 0, Tag::ring_payload);
      Pending receive_first = comm.irecv(first, 0, Tag::ring_header);
      Pending receive_second = comm.irecv(second, 0, Tag::ring_payload);
      comm.wait(receive_second, soon(), {.what = "second"});
      if (!comm.test(receive_first)) {
        ++num_overtaken;
        comm.wait(receive_first, soon(), {.what = "first"});
      }
      comm.wait(send_first, soon(), {.what = "sends"});
      comm.wait(send_second, soon(), {.what = "sends"});
    });
  }
  EXPECT_GT(num_overtaken, 0);
  EXPECT_LT(num_overtaken, 30);
}

TEST(LoopbackWorld, ShufflingFindsBytesThatChangeWhileTheyAreSent) {
  LoopbackWorld world(2, {.shuffle_seed = 5});
  const std::string text = text_thrown_by<InternalError>([&] {
    world.run([](Communicator& comm) {
      std::vector<std::byte> bytes(9);
      if (comm.rank() == 1) {
        Pending receive = comm.irecv(bytes, 0, Tag::test);
        comm.wait(receive, soon(), {.what = "receive"});
        return;
      }
      Pending send = comm.isend(bytes, 1, Tag::test);
      bytes[8] = std::byte{1};
      comm.wait(send, soon(), {.what = "send"});
    });
  });
  EXPECT_EQ(text, "internal error: rank 0: bytes changed while they were being sent to rank 1");
}

TEST(LateText, NamesTheOperationWhenThereIsNoStep) {
  EXPECT_EQ(late_text(2, {.what = "agree", .peer = 1, .bytes = 24}, Seconds(5)),
            "rank 2: agree: nothing from rank 1 within 5 s (24 bytes expected)");
  EXPECT_EQ(late_text(2, {.what = "ring hop", .step = 1, .peer = 1, .bytes = 8388608}, Seconds(5)),
            "rank 2: step 1: nothing from rank 1 within 5 s (8388608 bytes expected)");
  EXPECT_EQ(
      late_text(0, {.what = "x", .step = 0, .peer = 3, .bytes = 5, .is_send = true}, Seconds(0.25)),
      "rank 0: step 0: rank 3 did not take 5 bytes within 0.25 s");
}

}  // namespace
}  // namespace cpattn
