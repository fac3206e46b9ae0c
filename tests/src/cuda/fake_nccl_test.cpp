// The double of NCCL among threads.
#include "tests/support/cuda/fake_nccl.h"

#include <thread>
#include <vector>

#include "tests/src/cuda/double_test.h"

namespace cpattn::fake_nccl {
namespace {

class FakeNccl : public fake_cuda::DoubleTest {};

template <class Body>
void on_ranks(int num_ranks, const Body& body) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      body(rank, id);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FakeNccl, Ring) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    on_ranks(num_ranks, [&](int rank, const ncclUniqueId& id) {
      constexpr std::size_t kCount = 100'003;
      ncclComm_t communicator = nullptr;
      ASSERT_EQ(ncclCommInitRank(&communicator, num_ranks, id, rank), ncclSuccess);
      cudaStream_t work = nullptr;
      ASSERT_EQ(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking), cudaSuccess);
      int *mine = nullptr, *theirs = nullptr;
      ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&mine), kCount * sizeof(int)), cudaSuccess);
      ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&theirs), kCount * sizeof(int)), cudaSuccess);
      const int next = (rank + 1) % num_ranks, previous = (rank + num_ranks - 1) % num_ranks;
      fake_cuda::run_in(work, [=] {
        for (std::size_t i = 0; i < kCount; ++i) mine[i] = static_cast<int>(i) * 16 + rank;
      });
      ASSERT_EQ(ncclGroupStart(), ncclSuccess);
      ASSERT_EQ(ncclSend(mine, kCount, ncclInt32, next, communicator, work), ncclSuccess);
      ASSERT_EQ(ncclRecv(theirs, kCount, ncclInt32, previous, communicator, work), ncclSuccess);
      ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
      ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < kCount; ++i) {
        wrong += theirs[i] != static_cast<int>(i) * 16 + previous;
      }
      EXPECT_EQ(wrong, 0u);
      EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
      EXPECT_EQ(cudaFree(mine), cudaSuccess);
      EXPECT_EQ(cudaFree(theirs), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(work), cudaSuccess);
    });
  }
}

}  // namespace
}  // namespace cpattn::fake_nccl
