// What every transport of shards must do, on host memory and on the doubles of CUDA and NCCL.
#include <map>

#include "tests/src/cuda/ring_of_bytes.h"

namespace cpattn {
namespace {

constexpr unsigned kDelay_us = 300;

class ShardContract : public fake_cuda::DoubleTest, public testing::WithParamInterface<ShardCase> {
 protected:
  int size() const { return GetParam().size; }
  void run(const ShardBody& body) const { run_shards(GetParam().mover, size(), body); }
};

TEST_P(ShardContract, EverySpanArrivesInBothDirections) {
  for (const int direction : {1, -1}) {
    run([&](ShardTransport& transport, Stream stream) {
      expect_passes_deliver(transport, stream, {.direction = direction}, 2);
    });
  }
}

TEST_P(ShardContract, DelaysOfHopsAndOfStreamsChangeNothing) {
  fake_cuda::set_delays(7, kDelay_us);
  for (const std::uint64_t seed : {1, 2}) {
    run([&](ShardTransport& transport, Stream stream) {
      expect_passes_deliver(transport, stream, {.delay_seed = seed}, 2);
    });
  }
}

TEST_P(ShardContract, ChecksumsAreVerifiedOrRefused) {
  run([&](ShardTransport& transport, Stream stream) {
    if (transport.can_verify_checksums()) {
      return expect_passes_deliver(transport, stream, {.verify_checksum = true}, 1);
    }
    EXPECT_NE(text_thrown_by<InvalidArgument>([&] {
                RingExchange ring(transport, uneven_sizes(size()), {.verify_checksum = true});
              }).find("verify_checksum"),
              std::string::npos);
  });
}

TEST_P(ShardContract, BytesSentAreTheSpansThatLeft) {
  run([&](ShardTransport& transport, Stream stream) {
    const auto sizes = uneven_sizes(size());
    RingExchange ring(transport, sizes, {});
    const int rank = transport.control().rank(), round = 0;
    Seen seen;
    ring_pass(ring, rank, size(), stream, &round, &seen);
    transport.synchronize(stream, soon());
    std::size_t expected = 0;  // all spans but the one that arrives last
    for (const std::size_t bytes : sizes) expected += bytes;
    EXPECT_EQ(ring.stats().bytes_sent,
              expected - sizes[static_cast<std::size_t>((rank + 1) % size())]);
    EXPECT_EQ(seen.wrong, 0);
  });
}

TEST_P(ShardContract, MisuseIsAnInternalError) {
  if (size() == 1) return;  // nothing is ever posted
  run([&](ShardTransport& transport, Stream stream) {
    RingExchange ring(transport, uneven_sizes(size()), {});
    EXPECT_THROW(ring.wait(stream), InternalError);
    ring.post(stream);
    EXPECT_THROW(ring.post(stream), InternalError);
    EXPECT_THROW(ring.reset(), InternalError);
    ring.wait(stream);
    ring.reset();
  });
}

TEST_P(ShardContract, WaitingForAnIdleStreamReturns) {
  run([&](ShardTransport& transport, Stream stream) {
    transport.synchronize(stream, deadline_after(Seconds(0)));
    EXPECT_EQ(transport.device().kind(),
              GetParam().mover == Mover::host ? DeviceKind::cpu : DeviceKind::cuda);
    EXPECT_EQ(transport.can_capture(), GetParam().mover == Mover::nccl);
  });
}

INSTANTIATE_TEST_SUITE_P(On, ShardContract, testing::ValuesIn(shard_cases({1, 2, 3, 4, 8})),
                         case_name);

/// Hands another stream to the transfers, which is what a forgotten wait amounts to.
class MisorderedTransport final : public ShardTransport {
 public:
  enum class Fault { no_wait_before_send, no_wait_after_receive };
  MisorderedTransport(ShardTransport& inner, Fault fault, Stream idle)
      : inner_(inner), fault_(fault), idle_(idle) {}
  std::string_view transport() const override { return inner_.transport(); }
  Communicator& control() override { return inner_.control(); }
  Device& device() override { return inner_.device(); }
  void synchronize(Stream stream, Clock::time_point deadline) override {
    inner_.synchronize(stream, deadline);
  }
  bool can_verify_checksums() const override { return inner_.can_verify_checksums(); }
  std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                          const TransferOptions& options) override {
    return std::make_unique<Misordered>(inner_.make_transfer(kind, options), fault_, idle_);
  }

 private:
  class Misordered final : public Transfer {
   public:
    Misordered(std::unique_ptr<Transfer> inner, Fault fault, Stream idle)
        : inner_(std::move(inner)), fault_(fault), idle_(idle) {}
    bool is_active() const override { return inner_->is_active(); }
    bool is_in_flight() const override { return inner_->is_in_flight(); }
    void rethrow() const override { inner_->rethrow(); }
    void start(const TransferEnds& ends, Stream stream) override {
      inner_->start(ends, fault_ == Fault::no_wait_before_send ? idle_ : stream);
    }
    void poll() noexcept override { inner_->poll(); }
    void wait(Stream stream) override {
      inner_->wait(fault_ == Fault::no_wait_after_receive ? idle_ : stream);
    }
    std::uint64_t arrived_checksum() const override { return inner_->arrived_checksum(); }
    const TransferStats& stats() const override { return inner_->stats(); }

   private:
    std::unique_ptr<Transfer> inner_;
    Fault fault_;
    Stream idle_;
  };

  ShardTransport& inner_;
  Fault fault_;
  Stream idle_;
};

/// Spans that were not as sent, over all ranks.
int wrong_with(Mover mover, MisorderedTransport::Fault fault) {
  constexpr int kSize = 3, kRounds = 3;
  std::atomic<int> wrong{0};
  run_shards(mover, kSize, [&](ShardTransport& inner, Stream stream) {
    const int rank = inner.control().rank();
    const CudaStream idle = make_cuda_stream();
    MisorderedTransport transport(inner, fault, {idle.get()});
    RingExchange ring(transport, {4000, 4000, 4000}, {});
    const int rounds[kRounds] = {1, 2, 3};
    Seen seen;
    for (const int& round : rounds) ring_pass(ring, rank, kSize, stream, &round, &seen);
    inner.synchronize(stream, soon());
    inner.synchronize({idle.get()}, soon());
    wrong += seen.wrong;
  });
  return wrong;
}

class ShardFaults : public fake_cuda::DoubleTest {};

TEST_F(ShardFaults, MissingWaitIsCaught) {
  using Fault = MisorderedTransport::Fault;
  constexpr int kAttempts = 20;  // on a busy machine the right order can come about by itself
  const std::pair<Mover, Fault> kFaults[] = {
      {Mover::nccl, Fault::no_wait_before_send},
      {Mover::nccl, Fault::no_wait_after_receive},
      {Mover::staged, Fault::no_wait_before_send},
      {Mover::staged, Fault::no_wait_after_receive},
      {Mover::cuda_aware, Fault::no_wait_before_send},
  };
  // The thread sanitizer tells of a pair of places once, and both faults of a mover have the same.
  std::map<Mover, int> races;
  for (const auto& [mover, fault] : kFaults) {
    SCOPED_TRACE(testing::Message() << static_cast<int>(mover) << static_cast<int>(fault));
    int wrong = 0;
    for (int attempt = 0; attempt < kAttempts && wrong == 0; ++attempt) {
      fake_cuda::set_delays(11 + static_cast<std::uint64_t>(attempt), 3000);
      races[mover] += races_of([&, at = mover, what = fault] { wrong = wrong_with(at, what); });
    }
    EXPECT_GT(wrong, 0) << "found by wrong numbers";
  }
  for (const auto& [mover, found] : races) EXPECT_EQ(found > 0, kFindsRaces);
}

/// The event is passed although the kernel before it is still at work: the messages' bytes would be
/// of the last hop.
class BC_084 : public fake_cuda::DoubleTest {};

TEST_F(BC_084, BytesLeaveAfterTheSlowKernelThatFillsThem) {
  constexpr int kHops = 100;
  constexpr std::chrono::milliseconds kSpin{2};
  for (const Mover mover : {Mover::staged, Mover::cuda_aware}) {
    run_shards(mover, 2, [&](ShardTransport& transport, Stream stream) {
      const int rank = transport.control().rank();
      RingExchange ring(transport, {3000, 3000},
                        {.verify_checksum = transport.can_verify_checksums()});
      std::vector<int> numbers(kHops);
      Seen seen;
      for (int hop = 0; hop < kHops; ++hop) {
        const int* number = &(numbers[static_cast<std::size_t>(hop)] = hop);
        do_in(stream, [kSpin] { std::this_thread::sleep_for(kSpin); });
        ring_pass(ring, rank, 2, stream, number, &seen);
      }
      transport.synchronize(stream, soon());
      EXPECT_EQ(seen.wrong, 0);
      EXPECT_EQ(ring.stats().hops, kHops);
    });
  }
}

/// A statistic of every step, gathered in the order of the stream while spans still travel: the
/// largest is in the step that comes last.
class BC_082_Shards : public fake_cuda::DoubleTest {};

TEST_F(BC_082_Shards, AStatisticOfTheLastStepIsNotMissed) {
  constexpr int kRepeats = 50;
  fake_cuda::set_delays(3, 200);
  for (const int size : {2, 4}) {
    run_shards(Mover::nccl, size, [&](ShardTransport& transport, Stream stream) {
      const int rank = transport.control().rank();
      RingExchange ring(transport, std::vector<std::size_t>(static_cast<std::size_t>(size), 4), {});
      const Buffer largest = transport.device().allocate(sizeof(int));
      std::vector<int> results(kRepeats);
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        ring.reset();
        auto* own = reinterpret_cast<int*>(ring.own().data());
        // The span of rank r is the last one that rank r - 1 sees: there it is the largest.
        do_in(stream, [=] { *own = 100 * repeat + rank; });
        do_in(stream, [it = largest.as<int>()] { *it = -1; });
        for (int step = 0; step < size; ++step) {
          ring.post(stream);
          const auto* value = reinterpret_cast<const int*>(ring.current().data());
          do_in(stream, [=, it = largest.as<int>()] { *it = std::max(*it, *value); });
          ring.wait(stream);
        }
        int* result = &results[static_cast<std::size_t>(repeat)];
        do_in(stream, [=, it = largest.as<int>()] { *result = *it; });
      }
      transport.synchronize(stream, soon());
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        EXPECT_EQ(results[static_cast<std::size_t>(repeat)], 100 * repeat + size - 1);
      }
    });
  }
}

}  // namespace
}  // namespace cpattn
