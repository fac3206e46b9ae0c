// What DirectExchange must do on each transport: include, then instantiate DirectContract with the
// worlds of that transport.
#pragma once

#include <algorithm>
#include <vector>

#include "src/comm/direct_exchange.h"
#include "src/comm/ring_exchange.h"
#include "tests/src/comm_world.h"

namespace cpattn {

class DirectContract : public CommTest {};

/// Length of the span that `sender` sends in `step`; some are empty.
inline std::size_t direct_bytes(int sender, int step) {
  return static_cast<std::size_t>((sender * 7919 + step * 104729) % 5) * 3001;
}

/// `rounds` times: in step t every rank sends to the rank t below it, while it writes the next
/// span.
inline TransferStats expect_direct_delivers(Communicator& comm, const TransferOptions& options,
                                            int rounds) {
  const int size = comm.size(), rank = comm.rank();
  DirectExchange exchange(comm, 4 * 3001, 4 * 3001, options);
  std::size_t sent = 0;
  int hops = 0;
  for (int round = 0; round < rounds; ++round)
    for (int step = 1; step < size; ++step, ++hops) {
      const auto mine = pattern(rank, hops, direct_bytes(rank, step));
      std::copy(mine.begin(), mine.end(), exchange.outgoing().begin());
      const int from = (rank + step) % size;
      exchange.post({.step = step,
                     .to = (rank + size - step) % size,
                     .bytes_out = mine.size(),
                     .from = from,
                     .bytes_in = direct_bytes(from, step)});
      sent += mine.size();
      EXPECT_TRUE(exchange.is_active());
      // The other buffer is free while this one travels.
      std::fill(exchange.outgoing().begin(), exchange.outgoing().end(), std::byte{0xee});
      for (int i = 0; i < 3; ++i) exchange.poll();
      exchange.wait();
      EXPECT_FALSE(exchange.is_active());
      const auto expected = pattern(from, hops, direct_bytes(from, step));
      EXPECT_TRUE(std::equal(exchange.incoming().begin(), exchange.incoming().end(),
                             expected.begin(), expected.end()))
          << "rank " << rank << " round " << round << " step " << step;
    }
  EXPECT_EQ(exchange.stats().hops, hops);
  EXPECT_EQ(exchange.stats().messages_posted, 4 * hops);
  EXPECT_EQ(exchange.stats().bytes_sent, sent);
  return exchange.stats();
}

TEST_P(DirectContract, EverySpanReachesItsRank) {
  for (const bool verify_checksum : {true, false})
    run([&](Communicator& comm) {
      expect_direct_delivers(comm, {.verify_checksum = verify_checksum}, 3);
    });
}

TEST_P(DirectContract, DelaysChangeNothing) {
  for (const std::uint64_t seed : {1, 2})
    run([&](Communicator& comm) {
      expect_direct_delivers(comm, {.verify_checksum = true, .delay_seed = seed}, 2);
    });
}

TEST_P(DirectContract, ItSharesTheRanksWithARing) {
  // The order of the backward: the ring's hop is posted, the last direct hop waited for, the next
  // one posted, the ring waited for. Large spans, so that no transport buffers them.
  constexpr std::size_t kBytes = 200000;
  run([&](Communicator& comm) {
    const int size = comm.size(), rank = comm.rank();
    RingExchange ring(comm, std::vector<std::size_t>(static_cast<std::size_t>(size), kBytes),
                      {.verify_checksum = true});
    DirectExchange direct(comm, kBytes, kBytes, {.verify_checksum = true});
    const auto span = pattern(rank, 0, kBytes);
    std::copy(span.begin(), span.end(), ring.own().begin());
    const auto finish = [&](int step) {
      direct.wait();
      const auto expected = pattern((rank + step) % size, step, kBytes);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), direct.incoming().begin()));
    };
    for (int step = 0; step < size; ++step) {
      ring.post();
      if (step > 1) finish(step - 1);
      if (step > 0) {
        const auto mine = pattern(rank, step, kBytes);
        std::copy(mine.begin(), mine.end(), direct.outgoing().begin());
        direct.post({step, (rank + size - step) % size, kBytes, (rank + step) % size, kBytes});
      }
      ring.wait();
    }
    if (size > 1) finish(size - 1);
  });
}

}  // namespace cpattn
