// What becomes of a group when a rank, a call or the network fails: everybody ends in time with a
// text, streams drain, nothing is left.
#include <optional>
#include <string>
#include <vector>

#include "tests/src/cuda/ring_of_bytes.h"
#include "tests/support/cuda/fake_nccl.h"

namespace cpattn {
namespace {

const Seconds kTimeout{0.25};
/// On top of a deadline.
const Seconds kGrace{1.0};
/// On top of several, where a busy machine makes and takes down a whole group.
const Seconds kLife{10.0};

class NcclFailures : public fake_cuda::DoubleTest {
 protected:
  ~NcclFailures() override { fake_nccl::reset(); }
};

/// What ranks say when rank 1 takes part in everything but the hops.
struct Outcome {
  std::vector<std::string> texts;
  Seconds longest{0};
};

Outcome ring_without_rank_1(int size, bool host_waits) {
  Outcome outcome{std::vector<std::string>(static_cast<std::size_t>(size))};
  std::vector<Seconds> times(static_cast<std::size_t>(size));
  LoopbackWorld world(size);
  world.run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto transport = make_transport(Mover::nccl, comm);
    const CudaStream compute = make_compute_stream(comm.rank());
    RingExchange ring(*transport, std::vector<std::size_t>(static_cast<std::size_t>(size), 100'000),
                      {.timeout = kTimeout});
    const Clock::time_point begin = Clock::now();
    if (rank != 1) {
      ring.post({compute.get()});
      ring.wait({compute.get()});
      if (host_waits) {
        outcome.texts[rank] =
            text_thrown_by<CommError>([&] { transport->synchronize({compute.get()}, soon()); });
      } else {
        // The program waits in a way that we do not see; the thread that watches lets it go on.
        EXPECT_EQ(cudaStreamSynchronize(compute.get()), cudaSuccess);
        outcome.texts[rank] = text_thrown_by<CommError>([&] { ring.post({compute.get()}); });
      }
      times[rank] = Clock::now() - begin;
      EXPECT_EQ(cudaStreamQuery(compute.get()), cudaSuccess) << "drained";
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(text_thrown_by<CommError>([&] { ring.post({compute.get()}); }),
                  outcome.texts[rank])
            << "kept";
      }
      EXPECT_EQ(text_thrown_by<CommError>([&] { ring.reset(); }), outcome.texts[rank]);
      EXPECT_THROW(transport->synchronize({compute.get()}, soon()), CommError);
    }
    comm.barrier(soon(), "all have seen");
  });
  for (const Seconds time : times) outcome.longest = std::max(outcome.longest, time);
  return outcome;
}

TEST_F(NcclFailures, APeerThatNeverSendsIsNamedInTime) {
  for (const bool host_waits : {true, false}) {
    const Outcome two = ring_without_rank_1(2, host_waits);
    EXPECT_EQ(two.texts[0],
              "rank 0: step 0: nothing from rank 1 within 0.25 s (100000 bytes expected)");
    EXPECT_GE(two.longest, kTimeout);
    EXPECT_LT(two.longest, kTimeout + kGrace);
  }
  const Outcome three = ring_without_rank_1(3, true);
  EXPECT_EQ(three.texts[2],
            "rank 2: step 0: nothing from rank 1 within 0.25 s (100000 bytes expected), or rank 0 "
            "did not take 100000 bytes");
  EXPECT_NE(three.texts[0].find("rank 1 did not take 100000 bytes"), std::string::npos);
}

// The clock of a hop starts when its stream gets there: compute may take longer than a hop may.
TEST_F(NcclFailures, ComputeTakesItsTime) {
  run_shards(Mover::nccl, 2, [](ShardTransport& transport, Stream stream) {
    RingExchange ring(transport, {64, 64}, {.timeout = kTimeout});
    do_in(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(500)); });
    ring.post(stream);
    ring.wait(stream);
    transport.synchronize(stream, soon());
  });
}

TEST_F(NcclFailures, AStreamThatIsNotDoneAtTheCallersDeadlineIsGivenUp) {
  LoopbackWorld world(2);
  world.run([](Communicator& comm) {
    const auto transport = make_transport(Mover::nccl, comm);
    const CudaStream compute = make_compute_stream(comm.rank());
    const Stream stream{compute.get()};
    const int rank = comm.rank(), round = 0;
    RingExchange ring(*transport, {64, 64}, {});
    Seen seen;
    cuda_check(cudaStreamBeginCapture(compute.get(), cudaStreamCaptureModeThreadLocal), "begin");
    ring_pass(ring, rank, 2, stream, &round, &seen);
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamEndCapture(compute.get(), &graph), "end");
    cudaGraphExec_t exec = nullptr;
    cuda_check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cuda_check(cudaGraphDestroy(graph), "destroy");
    if (rank == 0) {  // replays alone
      cuda_check(cudaGraphLaunch(exec, compute.get()), "launch");
      EXPECT_EQ(text_thrown_by<CommError>(
                    [&] { transport->synchronize(stream, deadline_after(Seconds(0.2))); }),
                "rank 0: stream: not done within 0.2 s; graphs that it may be replaying receive "
                "from rank 1");
      EXPECT_EQ(cudaStreamQuery(compute.get()), cudaSuccess) << "drained";
    }
    comm.barrier(soon(), "seen");
    cuda_check(cudaGraphExecDestroy(exec), "destroy");
  });
}

TEST_F(NcclFailures, WhatNcclReportsIsThrownAndKept) {
  std::string text;
  LoopbackWorld world(2);
  world.run([&](Communicator& comm) {
    const CudaStream compute = make_compute_stream(comm.rank());
    const Stream stream{compute.get()};
    const auto device = std::make_shared<CudaDevice>(comm.rank());
    NcclCommunicator made = NcclCommunicator::make(comm, *device, Seconds(60));
    ncclComm_t handle = made.handle();
    NcclTransport transport(not_owned(comm), device, std::move(made));
    RingExchange ring(transport, {64, 64}, {.timeout = kTimeout});
    if (comm.rank() == 0) {
      ring.post(stream);
      ring.wait(stream);
      fake_nccl::fail_async(handle, ncclRemoteError, "the cable is gone");
      text = text_thrown_by<CommError>([&] { transport.synchronize(stream, soon()); });
      EXPECT_EQ(text_thrown_by<CommError>([&] { ring.post(stream); }), text);
    }
    comm.barrier(soon(), "seen");
  });
  EXPECT_EQ(text,
            "rank 0: NCCL communicator: NCCL: remote process exited or there was a network error "
            "(the cable is gone)");
}

// NCCL would hang; where a size does not fit, as the double tells, it is an error and not bytes.
TEST_F(NcclFailures, SizesThatDifferAreAnError) {
  std::string text;
  LoopbackWorld world(2);
  world.run([&](Communicator& comm) {
    const auto transport = make_transport(Mover::nccl, comm);
    const CudaStream compute = make_compute_stream(comm.rank());
    const std::size_t theirs = comm.rank() == 0 ? 32 : 64;
    RingExchange ring(*transport, {64, theirs}, {.timeout = kTimeout});
    try {
      ring.post({compute.get()});
      ring.wait({compute.get()});
      transport->synchronize({compute.get()}, soon());
    } catch (const CommError& error) {
      if (comm.rank() == 0) text = error.what();
    }
    comm.barrier(soon(), "seen");
  });
  EXPECT_NE(text.find("rank 0 receives 32 bytes from rank 1, which sends 64"), std::string::npos)
      << text;
}

TEST_F(NcclFailures, ADestroyedCommunicatorIsAnErrorAndNotACrash) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  LoopbackWorld world(1);
  world.run([&](Communicator& comm) {
    const CudaStream compute = make_compute_stream(0);
    ncclComm_t callers = nullptr;
    ASSERT_EQ(ncclCommInitRank(&callers, 1, id, 0), ncclSuccess);
    const auto device = std::make_shared<CudaDevice>(0);
    NcclTransport transport(not_owned(comm), device,
                            NcclCommunicator::borrow(comm, *device, callers, Seconds(60)));
    const auto transfer = transport.make_transfer(ExchangeKind::ring, {});
    ASSERT_EQ(ncclCommDestroy(callers), ncclSuccess);
    EXPECT_NE(text_thrown_by<CommError>([&] {
                transfer->start({}, {compute.get()});
              }).find("the communicator was aborted or destroyed"),
              std::string::npos);
  });
}

/// The whole life of a group, with every call of `api` on device 1 failing once in turn. Whatever
/// ends how: in time, and nothing is left (which the fixture sees to).
void fail_everywhere(Mover mover, const char* api, const std::function<void(int)>& fail_nth) {
  const auto live_a_life = [&] {
    LoopbackWorld world(2, {.must_receive_all = false});
    world.run([&](Communicator& comm) {
      const auto device = std::make_shared<CudaDevice>(comm.rank());
      const CudaStream compute = make_compute_stream(comm.rank());
      const Stream stream{compute.get()};
      std::shared_ptr<ShardTransport> transport;
      if (mover == Mover::nccl) {
        transport = std::make_shared<NcclTransport>(
            not_owned(comm), device, NcclCommunicator::make(comm, *device, kTimeout));
      } else {
        transport =
            std::make_shared<StagedTransport>(not_owned(comm), device, MessageMemory::pinned_host);
      }
      RingExchange ring(*transport, {300, 500}, {.timeout = kTimeout});
      const int round = 0;
      Seen seen;
      ring_pass(ring, comm.rank(), 2, stream, &round, &seen);
      transport->synchronize(stream, soon());
    });
  };
  const std::uint64_t before = fake_cuda::num_calls(api);
  live_a_life();
  const auto num_sites = static_cast<int>(fake_cuda::num_calls(api) - before);
  ASSERT_GT(num_sites, 0) << api;
  int num_thrown = 0;
  for (int site = 1; site <= num_sites / 2; ++site) {
    const Clock::time_point begin = Clock::now();
    fail_nth(site);
    try {
      live_a_life();
    } catch (const Error&) {
      ++num_thrown;
    }
    fail_nth(0);
    EXPECT_LT(Seconds(Clock::now() - begin), 2 * kTimeout + kLife) << api << " " << site;
  }
  EXPECT_GT(num_thrown, 0) << api;
}

TEST_F(NcclFailures, ACallOfCudaThatFailsLeavesNothing) {
  const char* const kAlways[] = {"cudaMalloc", "cudaStreamCreateWithPriority",
                                 "cudaEventCreateWithFlags", "cudaEventRecord"};
  const char* const kStaged[] = {"cudaHostAlloc", "cudaMemcpyAsync"};
  const auto fail = [](const char* api, Mover mover) {
    fail_everywhere(mover, api,
                    [api](int n) { fake_cuda::fail_after(api, n, cudaErrorMemoryAllocation, 1); });
  };
  for (const char* api : kAlways) {
    for (const Mover mover : {Mover::nccl, Mover::staged}) fail(api, mover);
  }
  for (const char* api : kStaged) fail(api, Mover::staged);
}

TEST_F(NcclFailures, ACallOfNcclThatFailsLeavesNothing) {
  for (const char* api :
       {"ncclCommInitRankConfig", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclGroupStart"}) {
    fail_everywhere(Mover::nccl, api,
                    [api](int n) { fake_nccl::fail_after(api, n, ncclSystemError, 1); });
  }
}

}  // namespace
}  // namespace cpattn
