#include "src/comm/ring_exchange.h"

#include <algorithm>
#include <list>

#include "tests/src/loopback_worlds.h"
#include "tests/src/ring_exchange_contract.h"

namespace cpattn {
namespace {

const auto kWorlds = testing::ValuesIn(loopback_worlds({1, 2, 3, 4, 8}));
INSTANTIATE_TEST_SUITE_P(Loopback, RingContract, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Loopback, BC_069, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Loopback, BC_071, kWorlds, world_name);
INSTANTIATE_TEST_SUITE_P(Loopback, BC_072, kWorlds, world_name);

/// Changes what leaves on one tag before it leaves.
class TamperingComm : public ForwardingComm {
 public:
  using Change = std::function<void(std::vector<std::byte>&)>;
  TamperingComm(Communicator& inner, Tag tag, Change change)
      : ForwardingComm(inner), tag_(tag), change_(std::move(change)) {}

  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    auto& copy = sent_.emplace_back(bytes.begin(), bytes.end());
    if (tag == tag_) change_(copy);
    return ForwardingComm::isend(copy, peer, tag);
  }

 private:
  Tag tag_;
  Change change_;
  std::list<std::vector<std::byte>> sent_;
};

TamperingComm::Change flip(std::size_t place) {
  return [place](std::vector<std::byte>& bytes) { bytes.at(place) ^= std::byte{0x10}; };
}

/// Rank 0 of two sends through `change` once; the text rank 1's wait() throws.
std::string text_after(Tag tag, const TamperingComm::Change& change,
                       const std::vector<std::size_t>& rank0_sizes,
                       const std::vector<std::size_t>& rank1_sizes) {
  std::string text;
  LoopbackWorld world(2, {.must_receive_all = false});
  world.run([&](Communicator& comm) {
    const RingOptions options{.timeout = Seconds(60), .verify_checksum = true};
    if (comm.rank() == 0) {
      TamperingComm tampering(comm, tag, change);
      RingExchange exchange(tampering, rank0_sizes, options);
      exchange.post();
      comm.barrier(soon(), "sent");  // its own hop fails or not, as the sizes say
    } else {
      RingExchange exchange(comm, rank1_sizes, options);
      exchange.post();
      text = text_thrown_by<CommError>([&] { exchange.wait(); });
      EXPECT_EQ(text_thrown_by<CommError>([&] { exchange.wait(); }), text) << "kept";
      EXPECT_EQ(text_thrown_by<CommError>([&] { exchange.post(); }), text) << "kept";
      comm.barrier(soon(), "sent");
    }
  });
  return text;
}

TEST(RingExchange, AnyCorruptedHeaderByteIsFound) {
  for (std::size_t place = 0; place < 48; ++place) {
    EXPECT_EQ(text_after(Tag::ring_header, flip(place), {5, 6}, {5, 6}),
              "rank 1: step 0: the header from rank 0 is corrupted")
        << "byte " << place;
  }
}

TEST(RingExchange, AnyCorruptedPayloadByteIsFound) {
  for (std::size_t place = 0; place < 21; ++place) {
    const std::string text = text_after(Tag::ring_payload, flip(place), {21, 6}, {21, 6});
    EXPECT_EQ(text.find("rank 1: step 0: the payload from rank 0 (span of rank 0, 21 bytes) is "
                        "corrupted: checksum "),
              0u)
        << text;
  }
}

TEST(RingExchange, ASpanDamagedInAnIntermediateSlotIsBlamedOnTheWay) {
  LoopbackWorld world(3, {.must_receive_all = false});
  const std::string text = text_thrown_by<CommError>([&] {
    world.run([](Communicator& comm) {
      RingExchange exchange(comm, {64, 64, 64}, {.verify_checksum = true});
      exchange.post();
      exchange.wait();
      if (comm.rank() == 1) const_cast<std::byte&>(exchange.current()[5]) ^= std::byte{1};
      exchange.post();
      exchange.wait();
    });
  });
  EXPECT_EQ(text.find("rank 2: step 1: the payload from rank 1 (span of rank 0, 64 bytes) is "
                      "corrupted"),
            0u)
      << text;
}

TEST(BC_079_Ring, ALengthIsJudgedByTheHeaderOfItsSender) {
  EXPECT_EQ(text_after(Tag::test, flip(0), {12, 8}, {16, 8}),
            "rank 1: step 0: rank 0 sent 12 bytes, expected 16");
}

// The transport says nothing, or the wrong thing, about lengths: it delivers what was posted.
TEST(BC_079_Ring, ALengthTheTransportHidesIsFoundByTheHeader) {
  for (const std::size_t sent : {16, 12}) {
    const std::size_t posted = 28 - sent;
    const auto resize = [=](std::vector<std::byte>& bytes) { bytes.resize(posted); };
    EXPECT_EQ(text_after(Tag::ring_payload, resize, {sent, 8}, {posted, 8}),
              "rank 1: step 0: rank 0 sent " + std::to_string(sent) + " bytes, expected " +
                  std::to_string(posted));
  }
}

TEST(RingExchange, ASpanOfTheWrongHopIsRefused) {
  LoopbackWorld world(3, {.must_receive_all = false});
  const std::string text = text_thrown_by<CommError>([&] {
    world.run([](Communicator& comm) {
      const std::vector<std::size_t> sizes{8, 8, 8};
      RingExchange exchange(comm, sizes, {});
      exchange.post();
      exchange.wait();
      RingExchange another(comm, sizes, {});  // starts counting again
      RingExchange& used = comm.rank() == 0 ? another : exchange;
      used.post();
      used.wait();
    });
  });
  // Whoever looks first: rank 1 gets an old hop, or rank 0 a newer one than it expects.
  const bool is_seen_by_rank1 = text == "rank 1: step 1: rank 0 sent hop 0, expected hop 1";
  const bool is_seen_by_rank0 = text == "rank 0: step 0: rank 2 sent hop 1, expected hop 0";
  EXPECT_TRUE(is_seen_by_rank1 || is_seen_by_rank0) << text;
}

TEST(RingExchange, APeerThatNeverSendsEndsAtTheDeadline) {
  for (const std::uint64_t seed : {0, 9}) {
    LoopbackWorld world(2, {.must_receive_all = false});
    const Clock::time_point started = Clock::now();
    const std::string text = text_thrown_by<CommError>([&] {
      world.run([&](Communicator& comm) {
        if (comm.rank() == 1) return;
        RingExchange exchange(comm, {24, 8388608}, {.timeout = Seconds(0.3), .delay_seed = seed});
        exchange.post();
        exchange.wait();
      });
    });
    EXPECT_EQ(text, "rank 0: step 0: nothing from rank 1 within 0.3 s (8388608 bytes expected)");
    EXPECT_GE(Seconds(Clock::now() - started), Seconds(0.3));
  }
}

TEST(RingExchange, APeerThatLeavesAfterOneHopIsNamedByItsNeighbour) {
  LoopbackWorld world(4, {.must_receive_all = false});
  std::string text;
  world.run([&](Communicator& comm) {
    RingExchange exchange(comm, {8, 8, 8, 8}, {.timeout = Seconds(1)});
    comm.barrier(soon(), "aligned");
    exchange.post();
    exchange.wait();
    if (comm.rank() == 1) return;
    exchange.post();
    const std::string mine = text_thrown_by<CommError>([&] {
      exchange.wait();
      exchange.post();
      exchange.wait();
    });
    if (comm.rank() == 2) text = mine;
  });
  EXPECT_EQ(text, "rank 2: step 1: nothing from rank 1 within 1 s (8 bytes expected)");
}

TEST(RingExchange, AHeaderWithoutItsPayloadIsSaidSo) {
  class Swallowing : public ForwardingComm {
   public:
    using ForwardingComm::ForwardingComm;
    Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
      return tag == Tag::ring_payload ? Pending{} : ForwardingComm::isend(bytes, peer, tag);
    }
  };
  LoopbackWorld world(2, {.must_receive_all = false});
  std::string text;
  world.run([&](Communicator& comm) {
    Swallowing swallowing(comm);
    Communicator& used = comm.rank() == 0 ? swallowing : comm;
    RingExchange exchange(used, {10, 20}, {.timeout = Seconds(0.3)});
    exchange.post();
    comm.barrier(soon(), "posted");
    if (comm.rank() == 1) text = text_thrown_by<CommError>([&] { exchange.wait(); });
    comm.barrier(soon(), "seen");
  });
  EXPECT_EQ(text,
            "rank 1: step 0: nothing from rank 0 within 0.3 s (10 bytes expected); its header did "
            "arrive");
}

TEST(RingExchange, PollKeepsAnErrorForWait) {
  LoopbackWorld world(2, {.must_receive_all = false});
  std::string text;
  world.run([&](Communicator& comm) {
    TamperingComm tampering(comm, Tag::ring_header, flip(3));
    Communicator& used = comm.rank() == 0 ? tampering : comm;
    RingExchange exchange(used, {10, 20}, {});
    exchange.post();
    comm.barrier(soon(), "posted");
    if (comm.rank() == 1) {
      for (int i = 0; i < 100; ++i) exchange.poll();
      text = text_thrown_by<CommError>([&] { exchange.wait(); });
      EXPECT_THROW(exchange.reset(), CommError);
    }
    comm.barrier(soon(), "seen");
  });
  EXPECT_EQ(text, "rank 1: step 0: the header from rank 0 is corrupted");
}

/// Counts the messages seen to complete, and every look.
class WatchingComm : public ForwardingComm {
 public:
  using ForwardingComm::ForwardingComm;
  bool test(Pending& pending) override {
    ++num_tests;
    const bool is_complete = ForwardingComm::test(pending);
    num_completed += is_complete ? 1 : 0;
    return is_complete;
  }
  int num_tests = 0;
  int num_completed = 0;
};

TEST(RingExchange, PollingAloneCompletesAHop) {
  for (const std::uint64_t seed : {0, 4}) {
    LoopbackWorld world(2);
    world.run([&](Communicator& inner) {
      WatchingComm comm(inner);
      RingExchange exchange(comm, {100000, 100000}, {.delay_seed = seed});
      exchange.post();
      const Clock::time_point until = soon();
      while (comm.num_completed < 4 && Clock::now() < until) exchange.poll();
      EXPECT_EQ(comm.num_completed, 4);

      const int before = comm.num_tests;
      exchange.wait();
      EXPECT_EQ(comm.num_tests, before) << "nothing was left to wait for";
    });
  }
}

TEST(RingExchange, PollingTooOftenCostsOnlyALookAtTheClock) {
  LoopbackWorld world(2);
  world.run([](Communicator& inner) {
    WatchingComm comm(inner);
    RingExchange exchange(comm, {100, 100}, {});
    exchange.post();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < 10000; ++i) exchange.poll();
    const Seconds elapsed = Clock::now() - start;

    // Four messages, looked at every 50 us at most, and once to begin with.
    EXPECT_LE(comm.num_tests, 4 * (elapsed / Seconds(50e-6) + 1));
    exchange.wait();
  });
}

TEST(RingExchange, MisuseIsAnInternalError) {
  LoopbackWorld world(2, {.must_receive_all = false});
  world.run([](Communicator& comm) {
    RingExchange exchange(comm, {8, 8}, {});
    EXPECT_THROW(exchange.wait(), InternalError);
    exchange.post();
    EXPECT_THROW(exchange.post(), InternalError);
    EXPECT_THROW(exchange.own(), InternalError);
    EXPECT_THROW(exchange.reset(), InternalError);
    exchange.wait();
    EXPECT_THROW(exchange.own(), InternalError);
    exchange.reset();
    EXPECT_EQ(exchange.own().size(), 8u);
  });
}

TEST(RingExchange, WrongArgumentsAreRefused) {
  LoopbackWorld world(2);
  world.run([](Communicator& comm) {
    EXPECT_THROW(RingExchange(comm, {8}, {}), InvalidArgument);
    EXPECT_THROW(RingExchange(comm, {8, 8, 8}, {}), InvalidArgument);
    EXPECT_THROW(RingExchange(comm, {8, 8}, {.direction = 0}), InvalidArgument);
    EXPECT_THROW(RingExchange(comm, {8, 8}, {.direction = 2}), InvalidArgument);
  });
}

TEST(RingExchange, OneRankPostsNothing) {
  LoopbackWorld world(1);
  world.run([](Communicator& inner) {
    CountingComm comm(inner);
    RingExchange exchange(comm, {100}, {.verify_checksum = true, .delay_seed = 3});
    for (int i = 0; i < 2; ++i) {
      exchange.post();
      exchange.poll();
      exchange.wait();
    }
    EXPECT_EQ(comm.num_posted, 0);
    EXPECT_EQ(exchange.stats().hops, 0);
    EXPECT_EQ(exchange.stats().bytes_sent, 0u);
  });
}

TEST(RingExchange, WorkspaceIsTwoSlotsOfTheMostThatIsHeld) {
  const std::vector<std::size_t> one{100}, three{5, 70, 0};
  EXPECT_EQ(RingExchange::workspace_bytes(whole_spans(one, 0, 1)), 100u);
  EXPECT_EQ(RingExchange::workspace_bytes(whole_spans(three, 2, 1)), 140u);
  EXPECT_EQ(RingExchange::workspace_bytes({.held = {5, 0, 2}, .passed_on = {5, 0, 0}}), 10u);
}

TEST(RingExchange, WholeSpansFollowTheRing) {
  const std::vector<std::size_t> sizes{5, 70, 9};
  const RingBytes forwards = whole_spans(sizes, 2, 1), backwards = whole_spans(sizes, 2, -1);
  EXPECT_EQ(forwards.held, (std::vector<std::size_t>{9, 70, 5}));
  EXPECT_EQ(forwards.passed_on, (std::vector<std::size_t>{9, 70, 0}));
  EXPECT_EQ(backwards.held, (std::vector<std::size_t>{9, 5, 70}));
  EXPECT_EQ(backwards.passed_on, (std::vector<std::size_t>{9, 5, 0}));
}

TEST(RingExchange, SizesOfOtherWorldsAreRefused) {
  LoopbackWorld world(2);
  world.run([](Communicator& comm) {
    const std::string place = "rank " + std::to_string(comm.rank()) + ": ring exchange: ";
    const auto text = [&](const auto& sizes) {
      return text_thrown_by<InvalidArgument>([&] { RingExchange(comm, sizes, {}); });
    };
    EXPECT_EQ(text(std::vector<std::size_t>{1, 2, 3}), place + "3 span sizes for 2 ranks");
    EXPECT_EQ(text(RingBytes{.held = {1, 2}, .passed_on = {1}}),
              place + "sizes of 2 and 1 steps for 2 ranks");
    EXPECT_EQ(text(RingBytes{}), place + "sizes of 0 and 0 steps for 2 ranks");
    EXPECT_EQ(text(RingBytes{.held = {1, 2, 3}, .passed_on = {1, 2, 0}}),
              place + "sizes of 3 and 3 steps for 2 ranks");
  });
}

}  // namespace
}  // namespace cpattn
