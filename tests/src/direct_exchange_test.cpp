#include "src/comm/direct_exchange.h"

#include "tests/src/direct_exchange_contract.h"
#include "tests/src/loopback_worlds.h"

namespace cpattn {
namespace {

INSTANTIATE_TEST_SUITE_P(Loopback, DirectContract,
                         testing::ValuesIn(loopback_worlds({1, 2, 3, 4, 7})), world_name);

/// The text that rank 1 of two is told when it posts `expected` and rank 0 `sent`.
std::string text_told(const DirectHop& sent, const DirectHop& expected) {
  std::string text;
  LoopbackWorld world(2, {.must_receive_all = false});
  world.run([&](Communicator& comm) {
    DirectExchange exchange(comm, 64, 64, {.timeout = Seconds(60), .verify_checksum = true});
    exchange.post(comm.rank() == 0 ? sent : expected);
    if (comm.rank() == 1) text = text_thrown_by<CommError>([&] { exchange.wait(); });
    comm.barrier(soon(), "seen");
  });
  return text;
}

TEST(DirectExchange, AWrongLengthIsNamed) {
  EXPECT_EQ(text_told({.step = 1, .to = 1, .bytes_out = 24, .from = 1, .bytes_in = 8},
                      {.step = 1, .to = 0, .bytes_out = 8, .from = 0, .bytes_in = 16}),
            "rank 1: step 1: rank 0 sent 24 bytes, expected 16");
}

TEST(DirectExchange, APeerThatNeverSendsEndsAtTheDeadline) {
  LoopbackWorld world(3, {.must_receive_all = false});
  const std::string text = text_thrown_by<CommError>([&] {
    world.run([](Communicator& comm) {
      if (comm.rank() != 0) return;
      DirectExchange exchange(comm, 64, 64, {.timeout = Seconds(0.2)});
      exchange.post({.step = 2, .to = 1, .bytes_out = 8, .from = 1, .bytes_in = 48});
      exchange.wait();
    });
  });
  EXPECT_EQ(text, "rank 0: step 2: nothing from rank 1 within 0.2 s (48 bytes expected)");
}

TEST(DirectExchange, SpansBeyondTheLongestAreRefused) {
  LoopbackWorld(1).run([](Communicator& comm) {
    DirectExchange exchange(comm, 64, 32, {});
    EXPECT_THROW(exchange.post({.bytes_out = 65}), InvalidArgument);
    EXPECT_THROW(exchange.post({.bytes_in = 33}), InvalidArgument);
  });
}

TEST(DirectExchange, MisuseIsAnInternalError) {
  LoopbackWorld(2).run([](Communicator& comm) {
    DirectExchange exchange(comm, 8, 8, {});
    const int peer = 1 - comm.rank();
    const DirectHop hop{.step = 1, .to = peer, .bytes_out = 8, .from = peer, .bytes_in = 8};
    EXPECT_THROW(exchange.wait(), InternalError);
    exchange.post(hop);
    EXPECT_THROW(exchange.post(hop), InternalError);
    exchange.wait();
  });
}

TEST(DirectExchange, WorkspaceIsTwoSpansOutAndOneIn) {
  EXPECT_EQ(DirectExchange::workspace_bytes(100, 7), 207u);
}

}  // namespace
}  // namespace cpattn
