// What RingExchange must do on each transport: include, then instantiate RingContract, BC_069,
// BC_071 and BC_072 with the worlds of that transport.
#pragma once

#include <set>
#include <vector>

#include "src/comm/forwarding_comm.h"
#include "src/comm/ring_exchange.h"
#include "tests/src/comm_world.h"

namespace cpattn {

class RingContract : public CommTest {};
class BC_069 : public CommTest {};
class BC_071 : public CommTest {};
class BC_072 : public CommTest {};

inline bool equals(std::span<const std::byte> left, const std::vector<std::byte>& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end());
}

/// `rounds` times round the ring; every rank must see every rank's span of that round, its own
/// first.
inline RingStats expect_ring_delivers(Communicator& comm, const std::vector<std::size_t>& sizes,
                                      const RingOptions& options, int rounds) {
  RingExchange exchange(comm, sizes, options);
  const int num_ranks = comm.size();
  for (int round = 0; round < rounds; ++round) {
    if (round > 0) exchange.reset();
    const auto mine = pattern(comm.rank(), round, sizes[comm.rank()]);
    EXPECT_EQ(exchange.own().size(), mine.size());
    std::copy(mine.begin(), mine.end(), exchange.own().begin());

    std::set<int> owners;
    for (int step = 0; step < num_ranks; ++step) {
      exchange.post();
      const int owner = exchange.current_owner();
      EXPECT_EQ(exchange.step(), step);
      const int expected = comm.rank() - step * options.direction + num_ranks * num_ranks;
      EXPECT_EQ(owner, expected % num_ranks);
      for (int i = 0; i < 3; ++i) exchange.poll();
      EXPECT_TRUE(equals(exchange.current(), pattern(owner, round, sizes[owner])))
          << "rank " << comm.rank() << " round " << round << " step " << step;
      owners.insert(owner);
      exchange.wait();
    }
    EXPECT_EQ(owners.size(), static_cast<std::size_t>(num_ranks));
  }
  const RingStats stats = exchange.stats();
  EXPECT_EQ(stats.hops, static_cast<std::int64_t>(rounds) * (num_ranks - 1));
  EXPECT_EQ(stats.messages_posted, 4 * stats.hops);
  EXPECT_GE(stats.exposed_seconds, 0.0);
  return stats;
}

inline std::vector<std::size_t> unequal_sizes(int num_ranks) {
  constexpr std::size_t kSizes[] = {5000, 0, 1, 65536, 7, 0, 12345, 8};
  std::vector<std::size_t> sizes;
  for (int rank = 0; rank < num_ranks; ++rank) sizes.push_back(kSizes[rank % 8]);
  return sizes;
}

TEST_P(RingContract, EveryRankSeesEverySpanInBothDirections) {
  for (const int direction : {1, -1}) {
    run([&](Communicator& comm) {
      expect_ring_delivers(comm, unequal_sizes(size()),
                           {.direction = direction, .verify_checksum = true}, 3);
    });
  }
}

// Rank r's span is wanted whole one hop on, and after that a third less at each.
TEST_P(RingContract, WhatIsPassedOnIsTheBeginningOfWhatCame) {
  const auto left_after = [](int owner, int hops) {
    std::size_t bytes = unequal_sizes(8)[static_cast<std::size_t>(owner)];
    for (int hop = 1; hop < hops; ++hop) bytes = bytes * 2 / 3;
    return bytes;
  };
  for (const int direction : {1, -1}) {
    run([&](Communicator& comm) {
      RingBytes bytes;
      for (int step = 0; step < size(); ++step) {
        const int owner = (comm.rank() - step * direction + size() * size()) % size();
        bytes.held.push_back(left_after(owner, step));
        bytes.passed_on.push_back(step + 1 < size() ? left_after(owner, step + 1) : 0);
      }
      RingExchange exchange(comm, bytes,
                            {.direction = direction, .verify_checksum = true, .delay_seed = 3});
      for (int round = 0; round < 2; ++round) {
        if (round > 0) exchange.reset();
        const auto mine = pattern(comm.rank(), round, bytes.held[0]);
        std::copy(mine.begin(), mine.end(), exchange.own().begin());
        std::size_t passed_on = exchange.stats().bytes_sent;
        for (std::size_t step = 0; step < bytes.held.size(); ++step) {
          const int owner = exchange.current_owner();
          auto expected = pattern(owner, round, left_after(owner, 0));
          expected.resize(bytes.held[step]);
          exchange.post();
          EXPECT_TRUE(equals(exchange.current(), expected)) << "step " << step;
          exchange.wait();
          passed_on += bytes.passed_on[step];
        }
        EXPECT_EQ(exchange.stats().bytes_sent, passed_on);
      }
    });
  }
}

// Three ranks on, nobody wants anything.
TEST_P(RingContract, StepsThatHaveNothingForAnybodyAreLeftOut) {
  run([&](Communicator& comm) {
    RingBytes bytes;
    const int num_steps = std::min(size(), 3);
    for (int step = 0; step < num_steps; ++step) {
      bytes.held.push_back(1000);
      bytes.passed_on.push_back(step + 1 < num_steps ? 1000 : 0);
    }
    RingExchange exchange(comm, bytes, {});
    for (int round = 0; round < 3; ++round) {
      if (round > 0) exchange.reset();
      const auto mine = pattern(comm.rank(), round, 1000);
      std::copy(mine.begin(), mine.end(), exchange.own().begin());
      for (int step = 0; step < num_steps; ++step) {
        exchange.post();
        EXPECT_TRUE(equals(exchange.current(), pattern(exchange.current_owner(), round, 1000)));
        exchange.wait();
      }
      EXPECT_EQ(exchange.step(), num_steps - 1);
    }
    EXPECT_EQ(exchange.stats().hops, 3 * (num_steps - 1));
  });
}

TEST_P(RingContract, WithoutChecksumsToo) {
  run([&](Communicator& comm) {
    expect_ring_delivers(comm, std::vector<std::size_t>(size(), 3000), {}, 2);
  });
}

TEST_P(RingContract, DelayedHopsChangeNothing) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    run([&](Communicator& comm) {
      expect_ring_delivers(comm, unequal_sizes(size()),
                           {.verify_checksum = true, .delay_seed = seed}, 2);
    });
  }
}

TEST_P(RingContract, SentBytesAreTheSpansThatLeft) {
  run([&](Communicator& comm) {
    const auto sizes = unequal_sizes(size());
    std::size_t expected = 0;  // all spans but the one that arrives last
    for (const std::size_t bytes : sizes) expected += bytes;
    expected -= sizes[(comm.rank() + 1) % size()];
    EXPECT_EQ(expect_ring_delivers(comm, sizes, {}, 1).bytes_sent, expected);
  });
}

// 50 hops of one block, checksummed; beyond what transports buffer (4 to 64 KiB in Open MPI).
TEST_P(BC_069, FiftyHopsOfALargeBlockComplete) {
  constexpr std::size_t kBytes = std::size_t{1} << 18;
  if (size() == 1) return;  // no hops
  const int rounds = (50 + size() - 2) / (size() - 1);
  run([&](Communicator& comm) {
    RingExchange exchange(comm, std::vector<std::size_t>(size(), kBytes),
                          {.verify_checksum = true});
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) exchange.reset();
      const auto mine = pattern(comm.rank(), round, kBytes);
      std::copy(mine.begin(), mine.end(), exchange.own().begin());
      for (int step = 0; step < size(); ++step) {
        exchange.post();
        exchange.wait();  // compares the owner's checksum
      }
      EXPECT_TRUE(equals(exchange.current(), pattern(exchange.current_owner(), round, kBytes)));
    }
    EXPECT_GE(exchange.stats().hops, 50);
  });
}

TEST_P(BC_071, RanksPostTheSameNumberOfMessagesWhateverTheyOwn) {
  for (const std::size_t full : {std::size_t{0}, std::size_t{4096}}) {
    run([&](Communicator& comm) {
      std::vector<std::size_t> sizes(size(), full);
      if (size() > 1) sizes[1] = 0;  // rank 1 owns no token
      const RingStats stats = expect_ring_delivers(comm, sizes, {.verify_checksum = true}, 2);
      const auto mine = std::as_bytes(std::span(&stats.messages_posted, 1));
      for (const auto& theirs : comm.all_gather(mine, soon(), "counters"))
        EXPECT_TRUE(equals(mine, theirs));
    });
  }
}

class CountingComm : public ForwardingComm {
 public:
  using ForwardingComm::ForwardingComm;
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    ++num_posted;
    return ForwardingComm::isend(bytes, peer, tag);
  }
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    ++num_posted;
    return ForwardingComm::irecv(bytes, peer, tag);
  }
  int num_posted = 0;
};

// 160 heads x K, V, lse packed into one span: four operations per hop, where 64 are allowed.
TEST_P(BC_072, AHopOfManyHeadsIsFewOperations) {
  constexpr int kMaxPerHop = 64;
  run([&](Communicator& inner) {
    CountingComm comm(inner);
    RingExchange exchange(comm, std::vector<std::size_t>(size(), 160 * (256 + 256 + 4)), {});
    for (int step = 0; step < size(); ++step) {
      const int before = comm.num_posted;
      exchange.post();
      exchange.wait();
      EXPECT_EQ(comm.num_posted - before, step + 1 < size() ? 4 : 0);
      EXPECT_LE(comm.num_posted - before, kMaxPerHop);
    }
    EXPECT_EQ(exchange.stats().messages_posted, comm.num_posted);
  });
}

}  // namespace cpattn
