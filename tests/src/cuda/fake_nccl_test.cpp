// The double of NCCL among threads: transfers, groups, graphs.
#include "tests/support/cuda/fake_nccl.h"

#include "tests/src/cuda/nccl_ranks.h"

namespace cpattn::fake_nccl {
namespace {

constexpr int kStride = 1'000'000;      // between the numbers of two ranks
constexpr std::size_t kLong = 100'003;  // more than a channel holds

class NcclTransfers : public NcclTest {};

TEST_F(NcclTransfers, GoAroundARing) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(num_ranks);
    fake_cuda::set_delays(static_cast<std::uint64_t>(num_ranks), 500);
    on_ranks(num_ranks, [&](Rank& rank, const ncclUniqueId& id) {
      ASSERT_EQ(rank.init(id), ncclSuccess);
      int* slots[2] = {rank.memory(kLong), rank.memory(kLong)};
      rank.count_from(kStride * rank.number(), slots[0], kLong);
      for (int step = 0; step < num_ranks - 1; ++step) {
        ASSERT_EQ(rank.pass_on(slots[step % 2], slots[1 - step % 2], kLong), ncclSuccess);
      }
      const int owner = rank.next();  // after one step less than a full turn
      if (num_ranks > 1) {
        EXPECT_EQ(rank.values(slots[(num_ranks - 1) % 2], kLong),
                  counted_from(kStride * owner, kLong));
      }
    });
  }
}

TEST_F(NcclTransfers, OfOnePairKeepTheirOrder) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    constexpr std::size_t kSizes[] = {1, 0, 40'000, 7};
    std::vector<int*> buffers;
    for (const std::size_t size : kSizes) buffers.push_back(rank.memory(size + 1));
    for (int i = 0; i < 4; ++i) {
      if (rank.number() == 0) rank.count_from(kStride * i, buffers[i], kSizes[i]);
    }
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    for (int i = 0; i < 4; ++i) {
      ASSERT_EQ(rank.number() == 0 ? rank.send(buffers[i], kSizes[i], 1)
                                   : rank.receive(buffers[i], kSizes[i], 0),
                ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(rank.values(buffers[i], kSizes[i]), counted_from(kStride * i, kSizes[i]));
    }
  });
}

/// Each rank sends first to everybody and only then receives: only as one group does that end.
TEST_F(NcclTransfers, OfOneGroupProgressTogether) {
  constexpr int kRanks = 3;
  on_ranks(kRanks, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* mine = rank.memory(kLong);
    rank.count_from(kStride * rank.number(), mine, kLong);
    std::vector<int*> theirs;
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess) << "groups nest";
    for (int peer = 0; peer < kRanks; ++peer) {
      ASSERT_EQ(rank.send(mine, kLong, peer), ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int peer = 0; peer < kRanks; ++peer) {
      ASSERT_EQ(rank.receive(theirs.emplace_back(rank.memory(kLong)), kLong, peer), ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int peer = 0; peer < kRanks; ++peer) {
      EXPECT_EQ(rank.values(theirs[static_cast<std::size_t>(peer)], kLong),
                counted_from(kStride * peer, kLong));
    }
  });
}

TEST_F(NcclTransfers, GatherInPlaceAndElsewhere) {
  constexpr int kRanks = 3, kCount = 5;
  on_ranks(kRanks, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int *all = rank.memory(kRanks * kCount), *mine = rank.memory(kCount);
    rank.count_from(kCount * rank.number(), mine, kCount);
    for (const int* from :
         {static_cast<const int*>(mine), static_cast<const int*>(all + kCount * rank.number())}) {
      ASSERT_EQ(ncclAllGather(from, all, kCount, ncclInt32, rank.communicator, rank.stream()),
                ncclSuccess);
      EXPECT_EQ(rank.values(all, kRanks * kCount), counted_from(0, kRanks * kCount));
    }
  });
}

TEST_F(NcclTransfers, BelongToTheirStream) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* value = rank.memory(1);
    std::atomic<bool> may_go{false};
    fake_cuda::run_in(rank.stream(), [&] {
      while (!may_go.load()) std::this_thread::yield();
    });
    rank.count_from(5, value, 1);
    ASSERT_EQ(rank.number() == 0 ? rank.send(value, 1, 1) : rank.receive(value, 1, 0), ncclSuccess);
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaErrorNotReady) << "the host ran ahead";
    may_go.store(true);
    EXPECT_EQ(rank.values(value, 1), std::vector<int>{5});
  });
}

/// A consumer in another stream: right with an event, a race without.
TEST_F(NcclTransfers, OrderOtherStreamsByEventsOnly) {
  const auto pass_value = [](bool waits) {
    on_ranks(2, [waits](Rank& rank, const ncclUniqueId& id) {
      ASSERT_EQ(rank.init(id), ncclSuccess);
      int* value = rank.memory(1);
      cudaStream_t consumer = nullptr;
      cudaEvent_t received = nullptr;
      ASSERT_EQ(cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking), cudaSuccess);
      ASSERT_EQ(cudaEventCreateWithFlags(&received, cudaEventDisableTiming), cudaSuccess);
      if (rank.number() == 0) rank.count_from(6, value, 1);
      ASSERT_EQ(rank.number() == 0 ? rank.send(value, 1, 1) : rank.receive(value, 1, 0),
                ncclSuccess);
      ASSERT_EQ(cudaEventRecord(received, rank.stream()), cudaSuccess);
      if (waits) {
        ASSERT_EQ(cudaStreamWaitEvent(consumer, received, 0), cudaSuccess);
      }
      fake_cuda::run_in(consumer, [=] { *value += 1; });
      ASSERT_EQ(cudaStreamSynchronize(consumer), cudaSuccess);
      if (waits) {
        EXPECT_EQ(rank.values(value, 1), std::vector<int>{7});
      }
      ASSERT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
      ASSERT_EQ(cudaStreamDestroy(consumer), cudaSuccess);
      ASSERT_EQ(cudaEventDestroy(received), cudaSuccess);
    });
  };

  EXPECT_EQ(races_of([&] { pass_value(true); }), 0);
  EXPECT_EQ(races_of([&] { pass_value(false); }) > 0, kFindsRaces);
}

TEST_F(NcclTransfers, AreReplayedInGraphs) {
  constexpr int kRanks = 3;
  fake_cuda::set_delays(11, 300);
  on_ranks(kRanks, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int *mine = rank.memory(kLong), *theirs = rank.memory(kLong);
    int round = 0;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    fake_cuda::run_in(rank.stream(), [&round, mine, number = rank.number()] {
      for (std::size_t i = 0; i < kLong; ++i) {
        mine[i] = kStride * number + round + static_cast<int>(i);
      }
    });
    ASSERT_EQ(rank.pass_on(mine, theirs, kLong), ncclSuccess);
    ASSERT_EQ(cudaStreamEndCapture(rank.stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (round = 1; round <= 3; ++round) {
      ASSERT_EQ(cudaGraphLaunch(exec, rank.stream()), cudaSuccess);
      EXPECT_EQ(rank.values(theirs, kLong), counted_from(kStride * rank.previous() + round, kLong));
    }
    ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  });
}

TEST_F(NcclTransfers, RefuseWhatDoesNotFit) {
  on_ranks(1, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* memory = rank.memory(4);
    int pageable = 0;
    EXPECT_EQ(rank.send(memory, 4, 1), ncclInvalidArgument);
    EXPECT_EQ(rank.error(), "ncclSend: peer 1 of 1");
    EXPECT_EQ(rank.send(memory, 4, -1), ncclInvalidArgument);
    EXPECT_EQ(rank.send(memory, 5, 0), ncclInvalidArgument) << "more than there is";
    EXPECT_EQ(rank.send(&pageable, 1, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclSend(memory, 1, ncclInt32, 0, nullptr, rank.stream()), ncclInvalidArgument);
    EXPECT_EQ(ncclSend(memory, 1, ncclInt32, 0, rank.communicator, nullptr),
              ncclUnhandledCudaError);
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(rank.send(rank.memory(1), 1, 0), ncclInvalidArgument) << "memory of another device";
    cudaStream_t elsewhere = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(ncclSend(memory, 1, ncclInt32, 0, rank.communicator, elsewhere), ncclInvalidUsage);
    ASSERT_EQ(cudaStreamDestroy(elsewhere), cudaSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "none is open";
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaSuccess) << "nothing was begun";
  });
}

// NCCL may let a device write into the memory of another one of its process, and the runtime opens
// pools to nobody by itself.
TEST_F(NcclTransfers, NeedMemoryThatNeighboursSee) {
  for (const int num_ranks : {1, 2}) {
    on_ranks(num_ranks, [&](Rank& rank, const ncclUniqueId& id) {
      ASSERT_EQ(rank.init(id), ncclSuccess);
      void* memory = nullptr;
      ASSERT_EQ(cudaMallocAsync(&memory, sizeof(int), rank.stream()), cudaSuccess);
      auto* const value = static_cast<int*>(memory);
      if (num_ranks == 1) {
        EXPECT_EQ(rank.pass_on(rank.memory(1), value, 1), ncclSuccess);
      } else {
        EXPECT_EQ(rank.receive(value, 1, rank.previous()), ncclInvalidArgument);
        EXPECT_NE(rank.error().find("memory of a pool"), std::string::npos) << rank.error();
      }
      ASSERT_EQ(cudaFreeAsync(memory, rank.stream()), cudaSuccess);
    });
  }
}

TEST_F(NcclTransfers, FailWithTheirGroup) {
  on_ranks(1, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* memory = rank.memory(2);
    for (const char* api : {"ncclSend", "ncclRecv", "ncclGroupEnd"}) {
      SCOPED_TRACE(api);
      fail_after(api, 1, ncclSystemError);
      ASSERT_EQ(ncclGroupStart(), ncclSuccess);
      const ncclResult_t sent = rank.send(memory, 1, 0), received = rank.receive(memory + 1, 1, 0);
      EXPECT_EQ(ncclGroupEnd(), ncclSystemError);
      const bool is_inside = std::string(api) != "ncclGroupEnd";
      EXPECT_EQ(sent == ncclSystemError || received == ncclSystemError, is_inside);
      EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaSuccess) << "nothing was begun";
      EXPECT_EQ(rank.pass_on(memory, memory + 1, 1), ncclSuccess) << "the next group is new";
      EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
    }
  });
}

TEST_F(NcclTransfers, NeedOneStreamAtATime) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    int* memory = rank.memory(2);
    ASSERT_EQ(ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(rank.receive(memory, 1, 1 - rank.number()), ncclSuccess);
    EXPECT_EQ(ncclRecv(memory + 1, 1, ncclInt32, 1 - rank.number(), rank.communicator, other),
              ncclInvalidUsage);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    ASSERT_EQ(rank.receive(memory, 1, 1 - rank.number()), ncclSuccess);
    ASSERT_EQ(ncclRecv(memory + 1, 1, ncclInt32, 1 - rank.number(), rank.communicator, other),
              ncclSuccess);
    EXPECT_EQ(rank.wait_for_async_error(), ncclInvalidUsage);
    EXPECT_EQ(rank.error(), "two streams use one communicator at once");
    EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
    rank.communicator = nullptr;
    EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  });
}

TEST_F(NcclTransfers, TakeMemoryOfTheLibrary) {
  on_ranks(1, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    void *memory = nullptr, *registration = nullptr;
    ASSERT_EQ(ncclMemAlloc(&memory, 2 * sizeof(int)), ncclSuccess);
    EXPECT_EQ(ncclCommRegister(rank.communicator, memory, 2 * sizeof(int), &registration),
              ncclSuccess);
    auto* values = static_cast<int*>(memory);
    rank.count_from(3, values, 1);
    EXPECT_EQ(rank.pass_on(values, values + 1, 1), ncclSuccess);
    EXPECT_EQ(rank.values(values, 2), (std::vector<int>{3, 3}));
    EXPECT_EQ(ncclCommDeregister(rank.communicator, registration), ncclSuccess);
    EXPECT_EQ(ncclCommDeregister(rank.communicator, registration), ncclInvalidArgument);
    EXPECT_EQ(ncclMemFree(memory), ncclSuccess);
  });
}

}  // namespace
}  // namespace cpattn::fake_nccl
