// What every Communicator must do, run on each transport: include, then instantiate
// CommunicatorContract and BC_079 with the worlds of that transport.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <tuple>  // std::ignore
#include <vector>

#include "tests/src/comm_world.h"

namespace cpattn {

class CommunicatorContract : public CommTest {};
class BC_079 : public CommTest {};

inline int next_of(const Communicator& comm) { return (comm.rank() + 1) % comm.size(); }
inline int previous_of(const Communicator& comm) {
  return (comm.rank() + comm.size() - 1) % comm.size();
}

/// Sends to the next rank and receives from the previous one (with one rank: itself).
inline std::vector<std::byte> pass_on(Communicator& comm, const std::vector<std::byte>& mine,
                                      std::size_t expected_bytes) {
  std::vector<std::byte> theirs(expected_bytes);
  Pending receive = comm.irecv(theirs, previous_of(comm), Tag::test);
  Pending send = comm.isend(mine, next_of(comm), Tag::test);
  comm.wait(receive, soon(), {.what = "pass_on", .peer = previous_of(comm)});
  comm.wait(send, soon(), {.what = "pass_on", .peer = next_of(comm), .is_send = true});
  EXPECT_FALSE(receive.is_active());
  EXPECT_FALSE(send.is_active());
  return theirs;
}

TEST_P(CommunicatorContract, RanksAreNumbered) {
  run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), size());
    const std::byte mine{static_cast<unsigned char>(comm.rank())};
    const auto all = comm.all_gather({&mine, 1}, soon(), "ranks");
    for (int rank = 0; rank < size(); ++rank)
      EXPECT_EQ(all[rank], std::vector<std::byte>{static_cast<std::byte>(rank)});
  });
}

TEST_P(CommunicatorContract, BytesArriveUnchangedAtEverySize) {
  run([&](Communicator& comm) {
    for (const std::size_t bytes : {0, 1, 3, 1023, 1024, 1025, 4095, 4096, 10007, 1 << 20}) {
      const auto mine = pattern(comm.rank(), 0, bytes);
      EXPECT_EQ(pass_on(comm, mine, bytes), pattern(previous_of(comm), 0, bytes)) << bytes;
    }
  });
}

TEST_P(CommunicatorContract, ZeroBytesAreAMessageToo) {
  run([&](Communicator& comm) {
    std::vector<std::byte> nothing, one(1);
    Pending first = comm.irecv(nothing, previous_of(comm), Tag::test);
    Pending second = comm.irecv(one, previous_of(comm), Tag::test);
    const auto mine = pattern(comm.rank(), 0, 1);
    Pending sent_empty = comm.isend({}, next_of(comm), Tag::test);
    Pending sent_one = comm.isend(mine, next_of(comm), Tag::test);
    for (Pending* pending : {&second, &first, &sent_one, &sent_empty})
      comm.wait(*pending, soon(), {.what = "zero bytes"});
    EXPECT_EQ(one, pattern(previous_of(comm), 0, 1));
  });
}

// Sizes on both sides of any cutting limit, all in flight at once, tested in reverse.
TEST_P(CommunicatorContract, AChannelIsFirstInFirstOut) {
  constexpr int kMessages = 40;
  const auto bytes_of = [](int message) { return static_cast<std::size_t>(message * 977 % 9001); };
  run([&](Communicator& comm) {
    std::vector<std::vector<std::byte>> received, sent;
    std::vector<Pending> pendings;
    for (int m = 0; m < kMessages; ++m) {
      received.emplace_back(bytes_of(m));
      sent.push_back(pattern(comm.rank(), m, bytes_of(m)));
    }
    for (int m = 0; m < kMessages; ++m) {
      pendings.push_back(comm.irecv(received[m], previous_of(comm), Tag::test));
      pendings.push_back(comm.isend(sent[m], next_of(comm), Tag::test));
    }
    std::reverse(pendings.begin(), pendings.end());
    for (Pending& pending : pendings) comm.wait(pending, soon(), {.what = "fifo"});
    for (int m = 0; m < kMessages; ++m)
      EXPECT_EQ(received[m], pattern(previous_of(comm), m, bytes_of(m))) << "message " << m;
  });
}

TEST_P(CommunicatorContract, TagsAreSeparateChannels) {
  run([&](Communicator& comm) {
    std::vector<std::byte> header(16), payload(5000);
    const auto out_header = pattern(comm.rank(), 1, 16),
               out_payload = pattern(comm.rank(), 2, 5000);
    Pending send_header = comm.isend(out_header, next_of(comm), Tag::ring_header);
    Pending send_payload = comm.isend(out_payload, next_of(comm), Tag::ring_payload);
    Pending receive_payload = comm.irecv(payload, previous_of(comm), Tag::ring_payload);
    comm.wait(receive_payload, soon(), {.what = "payload first"});
    Pending receive_header = comm.irecv(header, previous_of(comm), Tag::ring_header);
    for (Pending* pending : {&receive_header, &send_header, &send_payload})
      comm.wait(*pending, soon(), {.what = "tags"});
    EXPECT_EQ(header, pattern(previous_of(comm), 1, 16));
    EXPECT_EQ(payload, pattern(previous_of(comm), 2, 5000));
  });
}

TEST_P(CommunicatorContract, EveryPairTalksAtOnceAlsoWithItself) {
  run([&](Communicator& comm) {
    std::vector<std::vector<std::byte>> received(size(), std::vector<std::byte>(3001)),
        sent(size());
    std::vector<Pending> pendings;
    for (int peer = 0; peer < size(); ++peer) {
      sent[peer] = pattern(comm.rank(), peer, 3001);
      pendings.push_back(comm.isend(sent[peer], peer, Tag::test));
      pendings.push_back(comm.irecv(received[peer], peer, Tag::test));
    }
    for (Pending& pending : pendings) comm.wait(pending, soon(), {.what = "all pairs"});
    for (int peer = 0; peer < size(); ++peer)
      EXPECT_EQ(received[peer], pattern(peer, comm.rank(), 3001));
  });
}

TEST_P(CommunicatorContract, AllGatherTakesUnequalSizes) {
  const auto bytes_of = [](int rank) { return static_cast<std::size_t>(rank % 3 * 2500); };
  run([&](Communicator& comm) {
    const auto all =
        comm.all_gather(pattern(comm.rank(), 5, bytes_of(comm.rank())), soon(), "unequal");
    ASSERT_EQ(all.size(), static_cast<std::size_t>(size()));
    for (int rank = 0; rank < size(); ++rank)
      EXPECT_EQ(all[rank], pattern(rank, 5, bytes_of(rank)));
  });
}

TEST_P(CommunicatorContract, GatherReachesTheRootOnly) {
  run([&](Communicator& comm) {
    for (int root = 0; root < size(); ++root) {
      const auto mine = pattern(comm.rank(), root, 100 + comm.rank());
      const auto all = comm.gather(mine, root, soon(), "gather");
      ASSERT_EQ(all.size(), comm.rank() == root ? static_cast<std::size_t>(size()) : 0u);
      for (std::size_t rank = 0; rank < all.size(); ++rank)
        EXPECT_EQ(all[rank], pattern(static_cast<int>(rank), root, 100 + rank));
    }
    EXPECT_THROW(comm.gather({}, size(), soon(), "gather"), InvalidArgument);
  });
}

TEST_P(CommunicatorContract, NobodyLeavesABarrierBeforeTheLastOneEnters) {
  run([&](Communicator& comm) {
    comm.barrier(soon(), "aligned");
    if (comm.rank() == size() - 1) std::this_thread::sleep_for(Seconds(0.05));
    // Ranks of one machine share the clock, so the last entry must precede every exit.
    const Clock::rep entered = Clock::now().time_since_epoch().count();
    comm.barrier(soon(), "late");
    const Clock::rep left = Clock::now().time_since_epoch().count();

    const auto all = comm.all_gather(std::as_bytes(std::span(&entered, 1)), soon(), "entries");
    for (const auto& bytes : all) {
      Clock::rep entry;
      std::memcpy(&entry, bytes.data(), sizeof entry);
      EXPECT_LE(entry, left);
    }
  });
}

TEST_P(CommunicatorContract, PeersOutsideTheWorldAreRefused) {
  run([&](Communicator& comm) {
    std::vector<std::byte> bytes(1);
    for (const int peer : {-1, size()}) {
      EXPECT_THROW(std::ignore = comm.isend(bytes, peer, Tag::test), InvalidArgument);
      EXPECT_THROW(std::ignore = comm.irecv(bytes, peer, Tag::test), InvalidArgument);
    }
  });
}

TEST_P(CommunicatorContract, ADeadlineNamesRankStepPeerAndBytes) {
  run_broken([&](Communicator& comm) {
    if (comm.rank() != 0) return;
    Buffer bytes(77);
    const int peer = size() - 1;
    Pending pending = comm.irecv(bytes.bytes(), peer, Tag::test);
    const WaitContext context{.what = "contract", .step = 3, .peer = peer, .bytes = 77};
    const std::string text = text_thrown_by<CommError>(
        [&] { comm.wait(pending, deadline_after(Seconds(0.2)), context); });
    EXPECT_EQ(text, "rank 0: step 3: nothing from rank " + std::to_string(peer) +
                        " within 0.2 s (77 bytes expected)");
    comm.keep_until_end(std::move(bytes));
  });
}

TEST_P(CommunicatorContract, EveryRankOfAGatherNamesTheOneThatIsMissing) {
  if (size() == 1) return;  // nobody can be missing
  run_broken([&](Communicator& comm) {
    const int missing = size() - 1;
    comm.barrier(soon(), "aligned");
    if (comm.rank() == missing) return;
    const std::string text =
        text_thrown_by<CommError>([&] { comm.barrier(deadline_after(Seconds(1)), "start"); });
    EXPECT_NE(text.find("start: nothing from rank " + std::to_string(missing) + " within"),
              std::string::npos)
        << text;
  });
}

TEST_P(CommunicatorContract, CollectivesThatDifferAreFound) {
  if (size() == 1) return;  // nobody can differ
  run_broken([&](Communicator& comm) {
    const std::string_view what = comm.rank() == 0 ? "plan" : "report";
    const std::string text = text_thrown_by<CommError>([&] { comm.barrier(soon(), what); });
    const int other = comm.rank() == 0 ? size() - 1 : 0;
    EXPECT_EQ(text, "rank " + std::to_string(comm.rank()) + ": " + std::string(what) + ": rank " +
                        std::to_string(other) + " is in another collective");
  });
}

TEST_P(CommunicatorContract, EqualLinesAgree) {
  run([&](Communicator& comm) {
    agree(comm, "", soon());
    agree(comm, "sharding=zigzag\nchunk_tokens=512\n", soon());
  });
}

TEST_P(CommunicatorContract, DifferentLinesAreRefusedOnEveryRankWithOneText) {
  if (size() == 1) return;  // nobody can differ
  run([&](Communicator& comm) {
    const bool is_last = comm.rank() == size() - 1;
    const std::string lines =
        is_last ? "mask=causal\nsharding=contiguous\nextra=1" : "mask=causal\nsharding=zigzag";
    const std::string text = text_thrown_by<InvalidArgument>([&] { agree(comm, lines, soon()); });

    std::string others = size() == 2 ? "rank 0 has " : "ranks 0";
    for (int rank = 1; rank < size() - 1; ++rank) others += ", " + std::to_string(rank);
    if (size() > 2) others += " have ";
    const std::string last = ", rank " + std::to_string(size() - 1) + " has ";
    EXPECT_EQ(text, "sharding differs between ranks: " + others + "zigzag" + last +
                        "contiguous; extra differs between ranks: " + others + "(absent)" + last +
                        "1");
    comm.barrier(soon(), "still usable");
  });
}

TEST_P(CommunicatorContract, WhatRanksRefuseAlikeIsToldOnce) {
  if (size() != 4) return;
  run([&](Communicator& comm) {
    const std::string mine[] = {"", "q: bad", "k: bad", "q: bad"};
    EXPECT_EQ(text_thrown_by<InvalidArgument>(
                  [&] { refuse_together(comm, mine[comm.rank()], soon(), "check"); }),
              "ranks 1, 3: q: bad; rank 2: k: bad");
    comm.barrier(soon(), "still usable");
  });
}

TEST_P(CommunicatorContract, LinesInAnotherOrderAreRefused) {
  if (size() == 1) return;  // nobody can differ
  run([&](Communicator& comm) {
    const std::string_view lines = comm.rank() == 0 ? "a=1\nb=2" : "b=2\na=1";
    EXPECT_THROW(agree(comm, lines, soon()), InvalidArgument);
  });
}

// A length that is not the posted one is an error at the receiver, shorter or longer.
TEST_P(BC_079, AReceivedLengthOtherThanPostedIsAnError) {
  struct Case {
    std::size_t sent, posted;
  };
  for (const Case& at :
       {Case{12, 16}, Case{12, 8}, Case{0, 1}, Case{1, 0}, Case{10007, 9000}, Case{9000, 9500}}) {
    run_broken([&](Communicator& comm) {
      if (comm.rank() != 0 && comm.rank() != size() - 1) return;
      Buffer outgoing(at.sent), incoming(at.posted);
      Pending send, receive;
      if (comm.rank() == 0) send = comm.isend(outgoing.bytes(), size() - 1, Tag::test);
      if (comm.rank() == size() - 1) {
        receive = comm.irecv(incoming.bytes(), 0, Tag::test);
        const std::string text =
            text_thrown_by<CommError>([&] { comm.wait(receive, soon(), {.what = "lengths"}); });
        EXPECT_EQ(text.find("rank " + std::to_string(size() - 1) + ": "), 0u) << text;
        EXPECT_EQ(text.find("within"), std::string::npos) << "found by the deadline only: " << text;
      }
      if (comm.rank() == 0 && size() > 1) {
        // Whether a refused message counts as sent is up to the transport, but it needs us to move.
        try {
          comm.wait(send, deadline_after(Seconds(1)), {.what = "refused", .is_send = true});
        } catch (const CommError&) {
        }
      }
      comm.keep_until_end(std::move(outgoing));
      comm.keep_until_end(std::move(incoming));
    });
  }
}

}  // namespace cpattn
