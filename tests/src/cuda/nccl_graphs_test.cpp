// Transfers in graphs: what is captured, replayed, and mixed with eager passes.
#include "tests/src/cuda/ring_of_bytes.h"

namespace cpattn {
namespace {

class NcclGraphs : public fake_cuda::DoubleTest {};
class BC_085 : public fake_cuda::DoubleTest {};
class BC_086 : public fake_cuda::DoubleTest {};

using Graph = CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy>;

template <class Body>
Graph capture(Stream stream, const Body& body) {
  auto* const handle = static_cast<cudaStream_t>(stream.handle);
  cuda_check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "begin");
  body();
  cudaGraph_t graph = nullptr;
  cuda_check(cudaStreamEndCapture(handle, &graph), fake_cuda::complaint());
  cudaGraphExec_t exec = nullptr;
  cuda_check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cuda_check(cudaGraphDestroy(graph), "destroy");
  return Graph(exec);
}

void launch(const Graph& graph, Stream stream) {
  cuda_check(cudaGraphLaunch(graph.get(), static_cast<cudaStream_t>(stream.handle)), "launch");
}

/// The capture is the first thing that the exchanges do; then replays with new contents, and eager
/// passes between them.
void expect_replays_as_eager(ShardTransport& transport, Stream stream, int num_replays) {
  const int rank = transport.control().rank(), size = transport.control().size();
  RingExchange ring(transport, uneven_sizes(size), {.delay_seed = 5});
  DirectExchange direct(transport, kLongestDirect, kLongestDirect, {});
  int round = 0;
  Seen seen;
  const Graph graph = capture(stream, [&] {
    ring_pass(ring, rank, size, stream, &round, &seen);
    mixed_pass(ring, direct, rank, size, stream, &round, &seen);
  });
  EXPECT_EQ(seen.checked, 0) << "recorded, not done";
  int expected = 0;
  for (; round < num_replays; ++round) {
    launch(graph, stream);
    expected += 3 * size - 1;
    if (round % 3 == 1) {
      ring_pass(ring, rank, size, stream, &round, &seen);
      expected += size;
    }
    transport.synchronize(stream, soon());  // before the round that the stream reads changes
  }
  EXPECT_EQ(seen.wrong, 0) << "rank " << rank;
  EXPECT_EQ(seen.checked, expected);
}

TEST_F(BC_085, ACapturedFirstStepReplaysAmongEagerOnes) {
  fake_cuda::set_delays(9, 100);
  run_shards(Mover::nccl, 2, [](ShardTransport& transport, Stream stream) {
    expect_replays_as_eager(transport, stream, 20);
  });
}

TEST_F(NcclGraphs, WholePassesOfAnySizeReplay) {
  for (const int size : {1, 3, 4}) {
    run_shards(Mover::nccl, size, [](ShardTransport& transport, Stream stream) {
      expect_replays_as_eager(transport, stream, 4);
    });
  }
}

TEST_F(NcclGraphs, ReplaysThatAreQueuedFollowOneAnother) {
  fake_cuda::set_delays(4, 200);
  run_shards(Mover::nccl, 3, [](ShardTransport& transport, Stream stream) {
    const int rank = transport.control().rank(), round = 1;
    RingExchange ring(transport, {3000, 0, 100}, {});
    Seen seen;
    const Graph graph = capture(stream, [&] { ring_pass(ring, rank, 3, stream, &round, &seen); });
    for (int i = 0; i < 5; ++i) launch(graph, stream);
    transport.synchronize(stream, soon());
    EXPECT_EQ(seen.wrong, 0);
    EXPECT_EQ(seen.checked, 15);
  });
}

// A program that lets go of its graphs last, as a garbage collector may, is not kept waiting.
TEST_F(NcclGraphs, MayOutliveTheirTransport) {
  LoopbackWorld world(2);
  world.run([](Communicator& comm) {
    const CudaStream compute = make_compute_stream(comm.rank());
    const Stream stream{compute.get()};
    const int rank = comm.rank(), round = 1;
    Seen seen;
    Graph graph;
    {
      const auto transport = make_transport(Mover::nccl, comm);
      RingExchange ring(*transport, {300, 500}, {});
      graph = capture(stream, [&] { ring_pass(ring, rank, 2, stream, &round, &seen); });
      launch(graph, stream);
      transport->synchronize(stream, soon());
    }
    EXPECT_EQ(seen.wrong, 0);
    EXPECT_EQ(seen.checked, 2);
  });
}

// Another rank, or another part of the program, captures as strictly as can be meanwhile.
TEST_F(NcclGraphs, WatchingDisturbsNoCapture) {
  run_shards(Mover::nccl, 1, [](ShardTransport& transport, Stream) {
    const CudaStream other = make_cuda_stream();
    RingExchange ring(transport, {16}, {});
    LoopbackWorld pair(2);
    pair.run([&](Communicator& comm) {
      const auto device = std::make_shared<CudaDevice>(1 + comm.rank());
      const CudaStream compute = make_compute_stream(1 + comm.rank());
      NcclTransport transfers(not_owned(comm), device,
                              NcclCommunicator::make(comm, *device, Seconds(60)));
      const int rank = comm.rank(), round = 0;
      RingExchange inner(transfers, {100, 100}, {});
      Seen seen;
      comm.barrier(soon(), "made");
      if (rank == 0) {
        cuda_check(cudaStreamBeginCapture(other.get(), cudaStreamCaptureModeGlobal), "begin");
      }
      comm.barrier(soon(), "capturing");
      for (int i = 0; i < 3; ++i) ring_pass(inner, rank, 2, {compute.get()}, &round, &seen);
      transfers.synchronize({compute.get()}, soon());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the watcher has looked
      EXPECT_EQ(seen.wrong, 0);
      comm.barrier(soon(), "passed");
      if (rank == 0) {
        cudaGraph_t graph = nullptr;
        // The thread that began it was another stream's: ending it here is its own.
        EXPECT_EQ(cudaStreamEndCapture(other.get(), &graph), cudaSuccess) << fake_cuda::complaint();
        cudaGraphDestroy(graph);
      }
      comm.barrier(soon(), "ended");
    });
  });
}

TEST_F(NcclGraphs, StagedTransportsSayThatTheyCannot) {
  run_shards(Mover::staged, 2, [](ShardTransport& transport, Stream stream) {
    EXPECT_FALSE(transport.can_capture());
    auto* const handle = static_cast<cudaStream_t>(stream.handle);
    cuda_check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "begin");
    EXPECT_THROW(transport.synchronize(stream, soon()), InvalidArgument);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess) << "asking did not end it";
    cudaGraphDestroy(graph);
  });
}

// Two groups of the same ranks on two streams: neither sees anything of the other.
TEST_F(BC_086, TwoGroupsAtOnceOnTwoStreams) {
  constexpr int kIterations = 50, kSize = 2;
  fake_cuda::set_delays(6, 50);
  LoopbackWorld world(kSize);
  world.run([](Communicator& comm) {
    const int rank = comm.rank();
    const auto device = std::make_shared<CudaDevice>(rank);
    const CudaStream streams[2] = {make_compute_stream(rank), make_compute_stream(rank)};
    NcclTransport first(not_owned(comm), device,
                        NcclCommunicator::make(comm, *device, Seconds(60)));
    NcclTransport second(not_owned(comm), device,
                         NcclCommunicator::make(comm, *device, Seconds(60)));
    RingExchange rings[2] = {{first, {5000, 30}, {}}, {second, {10, 7000}, {}}};
    std::vector<int> numbers(2 * kIterations);
    Seen seen[2];
    for (int i = 0; i < 2 * kIterations; ++i) {
      const int which = i % 2;
      int* number = &numbers[static_cast<std::size_t>(i)];
      *number = 3 * i;
      ring_pass(rings[which], rank, kSize, {streams[which].get()}, number, &seen[which]);
    }
    first.synchronize({streams[0].get()}, soon());
    second.synchronize({streams[1].get()}, soon());
    for (const Seen& it : seen) {
      EXPECT_EQ(it.wrong, 0);
      EXPECT_EQ(it.checked, kIterations * kSize);
    }
  });
}

}  // namespace
}  // namespace cpattn
