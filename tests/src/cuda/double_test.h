// What tests on the doubles of the CUDA runtime and of NCCL share.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "tests/support/cuda/fake_cuda.h"
#include "tests/support/cuda/fake_worker.h"
#include "tests/support/races.h"

namespace cpattn::fake_cuda {

inline void run_in(cudaStream_t stream, std::function<void()> work) {
  ASSERT_EQ(run_in_stream(stream, std::move(work)), cudaSuccess) << complaint();
}

/// A test that fails on every race it did not ask for, and on what it leaves behind.
class DoubleTest : public ::testing::Test {
 protected:
  DoubleTest() {
    reset();
    before_ = live();
  }
  void TearDown() override {
    for (cudaStream_t stream : streams_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    for (cudaEvent_t event : events_) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    wait_for_workers();
    EXPECT_EQ(races_.num_unexpected(), 0);
    EXPECT_EQ(live(), before_);
    reset();
  }

  /// Given back when the test ends.
  cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.emplace_back(), flags), cudaSuccess);
    return streams_.back();
  }
  cudaEvent_t event(unsigned flags = cudaEventDisableTiming) {
    EXPECT_EQ(cudaEventCreateWithFlags(&events_.emplace_back(), flags), cudaSuccess);
    return events_.back();
  }
  template <class T>
  T* device_memory(std::size_t count) {
    EXPECT_EQ(cudaMalloc(&memory_.emplace_back(), count * sizeof(T)), cudaSuccess);
    return static_cast<T*>(memory_.back());
  }
  template <class Body>
  int races_of(const Body& body) {
    return races_.races_of(body);
  }

 private:
  RaceCount races_;
  Live before_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> memory_;
};

}  // namespace cpattn::fake_cuda
