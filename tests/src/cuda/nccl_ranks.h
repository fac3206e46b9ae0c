// Ranks of NCCL in tests: what each has, and how several are run.
#pragma once

#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/src/cuda/double_test.h"
#include "tests/support/cuda/fake_nccl.h"

namespace cpattn::fake_nccl {

inline ncclUniqueId unique_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

/// One rank: its device, a stream, memory that goes with it, and usually a communicator.
class Rank {
 public:
  Rank(int number, int of) : number_(number), of_(of) {
    EXPECT_EQ(cudaSetDevice(number % fake_cuda::machine().num_devices), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    if (communicator != nullptr) {
      EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess) << error();
    }
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess) << fake_cuda::complaint();
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
  }

  ncclResult_t init(const ncclUniqueId& id) {
    return ncclCommInitRank(&communicator, of_, id, number_);
  }
  ncclResult_t init_without_blocking(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return ncclCommInitRankConfig(&communicator, of_, id, number_, &config);
  }
  /// Polls until the communicator is not in progress.
  static ncclResult_t settle(ncclComm_t of) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      const ncclResult_t error = ncclCommGetAsyncError(of, &state);
      if (error != ncclSuccess) return error;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return state;
  }
  ncclResult_t settle() const { return settle(communicator); }
  ncclResult_t async_error() const {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t error = ncclCommGetAsyncError(communicator, &state);
    return error != ncclSuccess ? error : state;
  }
  /// Waits a while for an asynchronous error.
  ncclResult_t wait_for_async_error() const {
    for (int i = 0; i < 20'000 && async_error() == ncclSuccess; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return async_error();
  }
  std::string error() const { return ncclGetLastError(communicator); }

  int* memory(std::size_t count) {
    EXPECT_EQ(cudaMalloc(&memory_.emplace_back(), count * sizeof(int)), cudaSuccess);
    return static_cast<int*>(memory_.back());
  }
  /// In the stream: values[i] = first + i.
  void count_from(int first, int* values, std::size_t count) {
    fake_cuda::run_in(stream_, [=] {
      for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<int>(i);
    });
  }
  std::vector<int> values(const int* from, std::size_t count) {
    std::vector<int> result(count);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess) << fake_cuda::complaint();
    EXPECT_EQ(cudaMemcpy(result.data(), from, count * sizeof(int), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return result;
  }
  ncclResult_t send(const int* from, std::size_t count, int to) {
    return ncclSend(from, count, ncclInt32, to, communicator, stream_);
  }
  ncclResult_t receive(int* to, std::size_t count, int from) {
    return ncclRecv(to, count, ncclInt32, from, communicator, stream_);
  }
  /// One step around the ring: a group.
  ncclResult_t pass_on(const int* mine, int* theirs, std::size_t count) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    EXPECT_EQ(send(mine, count, next()), ncclSuccess) << error();
    EXPECT_EQ(receive(theirs, count, previous()), ncclSuccess) << error();
    return ncclGroupEnd();
  }

  int number() const { return number_; }
  int next() const { return (number_ + 1) % of_; }
  int previous() const { return (number_ + of_ - 1) % of_; }
  cudaStream_t stream() const { return stream_; }

  ncclComm_t communicator = nullptr;

 private:
  int number_ = 0;
  int of_ = 1;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
};

/// Ranks as threads.
inline void on_ranks(int num_ranks, const std::function<void(Rank&, const ncclUniqueId&)>& body) {
  const ncclUniqueId id = unique_id();
  std::vector<std::thread> threads;
  for (int number = 0; number < num_ranks; ++number) {
    threads.emplace_back([&, number] {
      Rank rank(number, num_ranks);
      body(rank, id);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<int> counted_from(int first, std::size_t count) {
  std::vector<int> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<int>(i);
  return values;
}

class NcclTest : public fake_cuda::DoubleTest {
 protected:
  void TearDown() override {
    DoubleTest::TearDown();
    reset();
  }
};

}  // namespace cpattn::fake_nccl
