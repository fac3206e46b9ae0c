// The double of NCCL among threads: communicators that begin, are split, break and end.
#include <atomic>

#include "src/base/error.h"
#include "tests/src/cuda/nccl_ranks.h"

namespace cpattn::fake_nccl {
namespace {

class NcclLife : public NcclTest {};

void abort(Rank& rank) {
  EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
  rank.communicator = nullptr;
}

TEST_F(NcclLife, CommunicatorsKnowWhoTheyAre) {
  on_ranks(3, [](Rank& rank, const ncclUniqueId& id) {
    int count = 0, number = -1, device = -1, version = 0;
    ASSERT_EQ(rank.init(id), ncclSuccess);
    EXPECT_EQ(ncclCommCount(rank.communicator, &count), ncclSuccess);
    EXPECT_EQ(ncclCommUserRank(rank.communicator, &number), ncclSuccess);
    EXPECT_EQ(ncclCommCuDevice(rank.communicator, &device), ncclSuccess);
    EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
    EXPECT_EQ(count, 3);
    EXPECT_EQ(number, rank.number());
    EXPECT_EQ(device, rank.number());
    EXPECT_EQ(version, NCCL_VERSION_CODE);
    EXPECT_EQ(rank.async_error(), ncclSuccess);
  });
}

TEST_F(NcclLife, WithoutBlockingIsInProgressUntilPolled) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    int count = 0;
    int *mine = rank.memory(1), *theirs = rank.memory(1);
    EXPECT_EQ(rank.init_without_blocking(id), ncclInProgress);
    EXPECT_EQ(ncclCommCount(rank.communicator, &count), ncclInvalidArgument);
    EXPECT_EQ(rank.send(mine, 1, 0), ncclInvalidArgument);
    EXPECT_EQ(rank.async_error(), ncclInProgress) << "the first answer, whatever is true";
    ASSERT_EQ(rank.settle(), ncclSuccess);
    EXPECT_EQ(ncclCommCount(rank.communicator, &count), ncclSuccess);

    rank.count_from(10 + rank.number(), mine, 1);
    ASSERT_EQ(rank.pass_on(mine, theirs, 1), ncclInProgress) << "peers that are new";
    EXPECT_EQ(rank.send(mine, 1, 0), ncclInvalidArgument);
    ASSERT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "it has not begun";
    ASSERT_EQ(rank.settle(), ncclSuccess);
    EXPECT_EQ(rank.values(theirs, 1), std::vector<int>{11 - rank.number()});

    rank.count_from(20 + rank.number(), mine, 1);
    ASSERT_EQ(rank.pass_on(mine, theirs, 1), ncclInProgress) << "peers that are known";
    ASSERT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "it has not begun";
    ASSERT_EQ(rank.settle(), ncclSuccess);
    EXPECT_EQ(rank.values(theirs, 1), std::vector<int>{21 - rank.number()});
    EXPECT_EQ(ncclCommFinalize(rank.communicator), ncclInProgress);
    EXPECT_EQ(rank.settle(), ncclSuccess);
    EXPECT_EQ(rank.send(mine, 1, 0), ncclInvalidUsage) << "finalized";
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaSuccess) << "finalize has waited";
  });
}

TEST_F(NcclLife, FirstMeetingOfPeersIsNoWorkForACapture) {
  on_ranks(1, [](Rank& rank, const ncclUniqueId& id) {
    int *mine = rank.memory(1), *theirs = rank.memory(1);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(rank.init_without_blocking(id), ncclInProgress);
    ASSERT_EQ(rank.settle(), ncclSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(rank.pass_on(mine, theirs, 1), ncclInvalidUsage);
    ASSERT_EQ(cudaStreamEndCapture(rank.stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  });
}

TEST_F(NcclLife, TheEndWaitsForGraphs) {
  for (const auto end : {ncclCommDestroy, ncclCommAbort}) {
    on_ranks(1, [end](Rank& rank, const ncclUniqueId& id) {
      int *mine = rank.memory(1), *theirs = rank.memory(1);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      ASSERT_EQ(rank.init(id), ncclSuccess);
      ASSERT_EQ(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal),
                cudaSuccess);
      ASSERT_EQ(rank.pass_on(mine, theirs, 1), ncclSuccess);
      ASSERT_EQ(cudaStreamEndCapture(rank.stream(), &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      std::atomic<bool> is_over{false};
      std::thread ending([&] {
        EXPECT_EQ(end(rank.communicator), ncclSuccess);
        is_over.store(true);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_FALSE(is_over.load());
      ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
      ending.join();
      rank.communicator = nullptr;
    });
  }
}

TEST_F(NcclLife, TwoRanksOnOneDeviceAreRefused) {
  fake_cuda::set_machine({.num_devices = 2});
  on_ranks(3, [](Rank& rank, const ncclUniqueId& id) {
    EXPECT_EQ(rank.init(id), ncclInvalidUsage);
    EXPECT_EQ(rank.error(), "Duplicate GPU detected : rank 0 and rank 2 both on CUDA device 0");
    EXPECT_EQ(rank.communicator, nullptr);
  });
  on_ranks(3, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init_without_blocking(id), ncclInProgress);
    EXPECT_EQ(rank.settle(), ncclInvalidUsage);
    EXPECT_EQ(rank.error(), "Duplicate GPU detected : rank 0 and rank 2 both on CUDA device 0");
    abort(rank);
  });
  set_fabric({.allows_duplicate_devices = true});
  on_ranks(3, [](Rank& rank, const ncclUniqueId& id) { EXPECT_EQ(rank.init(id), ncclSuccess); });
}

TEST_F(NcclLife, BeginningsThatAreRefused) {
  ncclComm_t none = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.magic = 0;
  EXPECT_EQ(ncclCommInitRankConfig(&none, 1, unique_id(), 0, &config), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&none, 2, unique_id(), 2), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&none, 0, unique_id(), 0), ncclInvalidArgument);
  fail_after("ncclCommInitRank", 1, ncclSystemError);
  EXPECT_EQ(ncclCommInitRank(&none, 1, unique_id(), 0), ncclSystemError);
  EXPECT_EQ(none, nullptr);
  fail_after("ncclGetUniqueId", 1, ncclSystemError);
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSystemError);
  EXPECT_STREQ(ncclGetErrorString(ncclSystemError), "unhandled system error");
}

TEST_F(NcclLife, AbortEndsAWaitForRanksThatDoNotCome) {
  Rank rank(0, 2);
  ASSERT_EQ(rank.init_without_blocking(unique_id()), ncclInProgress);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(rank.async_error(), ncclInProgress);
  abort(rank);
}

TEST_F(NcclLife, AbortFreesAStreamWhosePeerNeverSends) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    if (rank.number() == 1) return;
    bool is_next = false;
    ASSERT_EQ(rank.receive(rank.memory(1), 1, 1), ncclSuccess);
    fake_cuda::run_in(rank.stream(), [&] { is_next = true; });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaErrorNotReady);
    EXPECT_EQ(rank.async_error(), ncclSuccess) << "nobody tells";
    ncclComm_t old = rank.communicator;

    abort(rank);

    EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
    EXPECT_TRUE(is_next);
    ncclResult_t state = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(old, &state), ncclInvalidArgument);
    EXPECT_EQ(ncclSend(rank.memory(1), 1, ncclInt32, 1, old, rank.stream()), ncclInvalidArgument);
    EXPECT_EQ(ncclCommAbort(old), ncclInvalidArgument) << "once is enough";
    EXPECT_EQ(ncclCommDestroy(old), ncclInvalidArgument);
    EXPECT_STREQ(ncclGetLastError(old),
                 "ncclCommDestroy: the communicator was aborted or destroyed");
  });
}

TEST_F(NcclLife, LostPeersAreNoticedWhereATestSaysSo) {
  set_fabric({.notices_lost_peers = true});
  on_ranks(3, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    if (rank.number() == 1) return abort(rank);
    ASSERT_EQ(rank.receive(rank.memory(1), 1, 1), ncclSuccess);
    EXPECT_EQ(rank.wait_for_async_error(), ncclRemoteError);
    EXPECT_EQ(rank.error(), detail::concat("rank ", rank.number(), " has lost rank 1"));
    EXPECT_EQ(cudaStreamQuery(rank.stream()), cudaErrorNotReady) << "until abort";
    EXPECT_EQ(rank.send(rank.memory(1), 1, 1), ncclRemoteError);
    abort(rank);
    EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
  });
}

TEST_F(NcclLife, SizesThatDifferAreAnError) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* memory = rank.memory(4);
    if (rank.number() == 0) {
      ASSERT_EQ(rank.send(memory, 4, 1), ncclSuccess);
      EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess) << "the channel has taken it";
      return;
    }
    ASSERT_EQ(rank.receive(memory, 3, 0), ncclSuccess);
    EXPECT_EQ(rank.wait_for_async_error(), ncclInvalidUsage);
    EXPECT_EQ(rank.error(), "rank 1 receives 12 bytes from rank 0, which sends 16");
    abort(rank);
    EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
  });
}

TEST_F(NcclLife, AsynchronousErrorsOnDemand) {
  on_ranks(1, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* memory = rank.memory(2);
    ASSERT_EQ(rank.receive(memory, 1, 0), ncclSuccess);
    fail_async(rank.communicator, ncclSystemError, "a cable was pulled");
    EXPECT_EQ(rank.async_error(), ncclSystemError);
    EXPECT_EQ(rank.error(), "a cable was pulled");
    EXPECT_EQ(rank.send(memory, 1, 0), ncclSystemError);
    abort(rank);
    EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
  });
}

TEST_F(NcclLife, SplitsByColorAndOrdersByKey) {
  constexpr int kRanks = 5;
  for (const bool blocks : {true, false}) {
    on_ranks(kRanks, [blocks](Rank& rank, const ncclUniqueId& id) {
      if (blocks) {
        ASSERT_EQ(rank.init(id), ncclSuccess);
      } else {
        ASSERT_EQ(rank.init_without_blocking(id), ncclInProgress);
        ASSERT_EQ(rank.settle(), ncclSuccess);
      }
      for (int round = 0; round < 3; ++round) {
        const bool is_out = rank.number() == 4;
        const int color = is_out ? NCCL_SPLIT_NOCOLOR : rank.number() % 2;
        ncclComm_t child = nullptr;
        ASSERT_EQ(ncclCommSplit(rank.communicator, color, -rank.number(), &child, nullptr),
                  blocks ? ncclSuccess : ncclInProgress);
        ASSERT_EQ(rank.settle(), ncclSuccess);
        ASSERT_EQ(child == nullptr, is_out);
        if (is_out) continue;
        ASSERT_EQ(Rank::settle(child), ncclSuccess);
        int count = 0, number = -1;
        EXPECT_EQ(ncclCommCount(child, &count), ncclSuccess);
        EXPECT_EQ(ncclCommUserRank(child, &number), ncclSuccess);
        EXPECT_EQ(count, 2);
        EXPECT_EQ(number, 1 - rank.number() / 2) << "keys descend";
        int *mine = rank.memory(1), *all = rank.memory(2);
        rank.count_from(rank.number(), mine, 1);
        const ncclResult_t gathered = ncclAllGather(mine, all, 1, ncclInt32, child, rank.stream());
        EXPECT_EQ(gathered, blocks ? ncclSuccess : ncclInProgress);
        ASSERT_EQ(Rank::settle(child), ncclSuccess);
        EXPECT_EQ(rank.values(all, 2), (std::vector<int>{color + 2, color}));
        EXPECT_EQ(ncclCommDestroy(child), ncclSuccess);
      }
    });
  }
}

TEST_F(NcclLife, AbortEndsASplitThatOthersDoNotJoin) {
  on_ranks(2, [](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init_without_blocking(id), ncclInProgress);
    ASSERT_EQ(rank.settle(), ncclSuccess);
    if (rank.number() == 1) return;
    ncclComm_t child = nullptr;
    ASSERT_EQ(ncclCommSplit(rank.communicator, 0, 0, &child, nullptr), ncclInProgress);
    EXPECT_EQ(ncclCommAbort(child), ncclSuccess);
    EXPECT_EQ(rank.settle(), ncclInternalError);
    abort(rank);
  });
}

TEST_F(NcclLife, DestroyWaitsForTransfers) {
  std::atomic<bool> may_send{false};
  on_ranks(2, [&](Rank& rank, const ncclUniqueId& id) {
    ASSERT_EQ(rank.init(id), ncclSuccess);
    int* memory = rank.memory(1);
    if (rank.number() == 0) {
      while (!may_send.load()) std::this_thread::yield();
      ASSERT_EQ(rank.send(memory, 1, 1), ncclSuccess);
      return;
    }
    ASSERT_EQ(rank.receive(memory, 1, 0), ncclSuccess);
    may_send.store(true);
    EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclSuccess);
    rank.communicator = nullptr;
    EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
  });
}

TEST_F(NcclLife, ReplayAfterTheEndIsAnError) {
  Rank rank(0, 1);
  ASSERT_EQ(rank.init(unique_id()), ncclSuccess);
  int *mine = rank.memory(1), *theirs = rank.memory(1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(rank.pass_on(mine, theirs, 1), ncclSuccess);
  ASSERT_EQ(cudaStreamEndCapture(rank.stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  std::thread ending([&] { EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclSuccess); });
  while (fake_cuda::live().communicators > 0) std::this_thread::yield();

  ASSERT_EQ(cudaGraphLaunch(exec, rank.stream()), cudaSuccess);

  EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaErrorIllegalAddress);
  EXPECT_EQ(fake_cuda::complaint(), "a transfer of a destroyed communicator");
  fake_cuda::reset();
  ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ending.join();
  rank.communicator = nullptr;
}

}  // namespace
}  // namespace cpattn::fake_nccl
