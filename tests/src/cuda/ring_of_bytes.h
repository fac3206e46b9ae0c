// Passes of a ring and of a direct exchange that "compute" on every span in the order of a stream.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "src/comm/direct_exchange.h"
#include "src/comm/ring_exchange.h"
#include "tests/src/cuda/shard_world.h"

namespace cpattn {

/// Some empty, some of one byte, some that no transport buffers.
inline std::vector<std::size_t> uneven_sizes(int num_ranks) {
  constexpr std::size_t kSizes[] = {5000, 0, 1, 100'000, 7, 0, 12345, 16};
  std::vector<std::size_t> sizes;
  for (int rank = 0; rank < num_ranks; ++rank) sizes.push_back(kSizes[rank % 8]);
  return sizes;
}

/// What a rank sees of its passes, filled in by its stream.
struct Seen {
  int wrong = 0;    ///< spans that were not the ones expected
  int checked = 0;  ///< spans
};

inline void write_in(Stream stream, std::span<std::byte> span, int sender, const int* message) {
  do_in(stream, [=] {
    const auto bytes = pattern(sender, *message, span.size());
    std::copy(bytes.begin(), bytes.end(), span.begin());
  });
}

inline void check_in(Stream stream, std::span<const std::byte> span, int sender, const int* message,
                     Seen* seen) {
  do_in(stream, [=] {
    const auto bytes = pattern(sender, *message, span.size());
    seen->wrong += !std::equal(bytes.begin(), bytes.end(), span.begin(), span.end());
    ++seen->checked;
  });
}

/// One pass; `*round` is read by the stream, so that a captured pass can be replayed with another.
inline void ring_pass(RingExchange& ring, int rank, int size, Stream stream, const int* round,
                      Seen* seen) {
  ring.reset();
  write_in(stream, ring.own(), rank, round);
  for (int step = 0; step < size; ++step) {
    ring.post(stream);
    EXPECT_EQ(ring.current().data(), ring.at_step(step));
    check_in(stream, ring.current(), ring.current_owner(), round, seen);
    ring.poll();
    ring.wait(stream);
  }
}

/// In step t every rank sends to the rank t below it, while it writes the next span.
inline void direct_pass(DirectExchange& direct, int rank, int size, Stream stream, const int* round,
                        Seen* seen) {
  constexpr std::size_t kUnit = 3001;
  const auto bytes_of = [](int sender, int step) {
    return static_cast<std::size_t>((sender * 3 + step) % 4) * kUnit;
  };
  direct.reset();
  for (int step = 1; step < size; ++step) {
    const int from = (rank + step) % size;
    write_in(stream, direct.outgoing().first(bytes_of(rank, step)), rank, round);
    direct.post({.step = step,
                 .to = (rank + size - step) % size,
                 .bytes_out = bytes_of(rank, step),
                 .from = from,
                 .bytes_in = bytes_of(from, step)},
                stream);
    const std::span<std::byte> next = direct.outgoing();  // free while the other one travels
    do_in(stream, [next] { std::fill(next.begin(), next.end(), std::byte{0xee}); });
    direct.wait(stream);
    check_in(stream, direct.incoming(), from, round, seen);
  }
}
inline constexpr std::size_t kLongestDirect = 3 * 3001;

/// The order of the backward: the ring's hop is under way while a direct hop ends and another
/// begins.
inline void mixed_pass(RingExchange& ring, DirectExchange& direct, int rank, int size,
                       Stream stream, const int* round, Seen* seen) {
  const std::size_t bytes = kLongestDirect;
  ring.reset();
  direct.reset();
  write_in(stream, ring.own(), rank, round);
  for (int step = 0; step < size; ++step) {
    ring.post(stream);
    check_in(stream, ring.current(), ring.current_owner(), round, seen);
    if (step > 1) {
      direct.wait(stream);
      check_in(stream, direct.incoming(), (rank + step - 1) % size, round, seen);
    }
    if (step > 0) {
      write_in(stream, direct.outgoing().first(bytes), rank, round);
      direct.post({step, (rank + size - step) % size, bytes, (rank + step) % size, bytes}, stream);
    }
    ring.wait(stream);
  }
  if (size == 1) return;
  direct.wait(stream);
  check_in(stream, direct.incoming(), (rank + size - 1) % size, round, seen);
}

/// `rounds` passes of all three kinds on one rank; every span is as sent.
inline void expect_passes_deliver(ShardTransport& transport, Stream stream,
                                  const RingOptions& options, int rounds) {
  const int rank = transport.control().rank(), size = transport.control().size();
  const TransferOptions direct_options{options.timeout, options.verify_checksum,
                                       options.delay_seed};
  RingExchange ring(transport, uneven_sizes(size), options);
  DirectExchange direct(transport, kLongestDirect, kLongestDirect, direct_options);
  std::vector<int> numbers(static_cast<std::size_t>(rounds));
  Seen seen;
  for (int round = 0; round < rounds; ++round) {
    const int* number = &(numbers[static_cast<std::size_t>(round)] = round);
    ring_pass(ring, rank, size, stream, number, &seen);
    direct_pass(direct, rank, size, stream, number, &seen);
    mixed_pass(ring, direct, rank, size, stream, number, &seen);
  }
  transport.synchronize(stream, soon());
  EXPECT_EQ(seen.wrong, 0) << "rank " << rank;
  EXPECT_EQ(seen.checked, rounds * (2 * size + 2 * (size - 1)));
  EXPECT_EQ(ring.stats().hops, 2 * rounds * (size - 1));
}

}  // namespace cpattn
