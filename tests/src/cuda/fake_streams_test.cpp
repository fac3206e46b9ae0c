// The double of the runtime: what streams, events and kernels order, and what they do not.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/launch.h"
#include "tests/src/cuda/double_test.h"

namespace cpattn::fake_cuda {
namespace {

constexpr unsigned kDelay_us = 2000;

__global__ void add_one(int* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] += 1;
}

void launch_add_one(int* values, int count, cudaStream_t stream) {
  constexpr int kBlock = 32;
  cuda::launch(add_one, dim3(static_cast<unsigned>((count + kBlock - 1) / kBlock)), dim3(kBlock), 0,
               stream, values, count);
}

class Streams : public DoubleTest {};

TEST_F(Streams, DoWhatTheyAreGivenInOrderWhileTheHostRunsAhead) {
  cudaStream_t work = stream();
  std::atomic<bool> may_go{false};
  std::vector<int> order;
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  for (int i = 0; i < 10; ++i) run_in(work, [&order, i] { order.push_back(i); });
  EXPECT_EQ(cudaStreamQuery(work), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady) << "remembered, until it is asked for";

  may_go.store(true);

  EXPECT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(work), cudaSuccess);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_F(Streams, RunKernels) {
  constexpr int kCount = 70;
  cudaStream_t work = stream();
  auto* values = device_memory<int>(kCount);
  ASSERT_EQ(cudaMemsetAsync(values, 0, kCount * sizeof(int), work), cudaSuccess);
  for (int i = 0; i < 3; ++i) launch_add_one(values, kCount, work);
  std::vector<int> result(kCount);

  ASSERT_EQ(
      cudaMemcpyAsync(result.data(), values, kCount * sizeof(int), cudaMemcpyDeviceToHost, work),
      cudaSuccess);

  EXPECT_EQ(result, std::vector<int>(kCount, 3)) << "a copy to pageable memory waits";
  EXPECT_EQ(num_pageable_copies(), 1u);
  EXPECT_EQ(num_calls("cudaLaunchKernelEx"), 3u);
  EXPECT_EQ(num_calls("kernel"), 3u);
}

TEST_F(Streams, RunAtOnce) {
  cudaStream_t first = stream(), second = stream();
  std::atomic<bool> is_met{false};

  run_in(first, [&] {
    while (!is_met.load()) std::this_thread::yield();
  });
  run_in(second, [&] { is_met.store(true); });

  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Streams, WaitForEvents) {
  set_delays(1, kDelay_us);
  cudaStream_t first = stream(), second = stream();
  cudaEvent_t done = event();
  int value = 0, seen = 0;
  for (int round = 1; round <= 20; ++round) {
    run_in(first, [&, round] { value = round; });
    ASSERT_EQ(cudaEventRecord(done, first), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(second, done, 0), cudaSuccess);
    run_in(second, [&] { seen = value; });
    ASSERT_EQ(cudaEventRecord(done, second), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(first, done, 0), cudaSuccess);
    ASSERT_EQ(cudaEventSynchronize(done), cudaSuccess);
    EXPECT_EQ(seen, round);
  }
}

/// Writer and reader in two streams; without `waits` nothing orders them.
int rounds_gone_wrong(cudaStream_t writer, cudaStream_t reader, cudaEvent_t written, bool waits) {
  auto* memory = new std::vector<int>(2, 0);
  int wrong = 0;
  for (int round = 1; round <= 30; ++round) {
    run_in(writer, [=] { (*memory)[0] = round; });
    EXPECT_EQ(cudaEventRecord(written, writer), cudaSuccess);
    if (waits) {
      EXPECT_EQ(cudaStreamWaitEvent(reader, written, 0), cudaSuccess);
    }
    run_in(reader, [=] { (*memory)[1] = (*memory)[0]; });
    EXPECT_EQ(cudaStreamSynchronize(reader), cudaSuccess);
    wrong += (*memory)[1] != round;
    EXPECT_EQ(cudaStreamSynchronize(writer), cudaSuccess);
  }
  delete memory;
  return wrong;
}

TEST_F(Streams, MissingWaitIsFoundByDelaysAndByTheThreadSanitizer) {
  set_delays(3, kDelay_us);
  cudaStream_t writer = stream(), reader = stream();
  cudaEvent_t written = event();
  EXPECT_EQ(rounds_gone_wrong(writer, reader, written, true), 0);
  int wrong = 0;

  const int races = races_of([&] { wrong = rounds_gone_wrong(writer, reader, written, false); });

  EXPECT_GT(wrong, 0);
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(Streams, MissingWaitBetweenKernelsIsFound) {
  constexpr int kCount = 40;
  cudaStream_t first = stream(), second = stream();
  cudaEvent_t done = event();
  auto* values = device_memory<int>(kCount);
  ASSERT_EQ(cudaMemset(values, 0, kCount * sizeof(int)), cudaSuccess);
  const auto add_twice = [&](bool waits) {
    launch_add_one(values, kCount, first);
    ASSERT_EQ(cudaEventRecord(done, first), cudaSuccess);
    if (waits) {
      ASSERT_EQ(cudaStreamWaitEvent(second, done, 0), cudaSuccess);
    }
    launch_add_one(values, kCount, second);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };

  EXPECT_EQ(races_of([&] { add_twice(true); }), 0);
  EXPECT_EQ(races_of([&] { add_twice(false); }) > 0, kFindsRaces);
}

/// The first stream is long done when the host puts work into the second, and still nothing but
/// luck has ordered them: neither the queue, nor a poll, nor an event recorded anew.
TEST_F(Streams, LuckIsNoOrder) {
  cudaStream_t writer = stream(), reader = stream();
  cudaEvent_t reused = event(), other = event();
  static int value = 0;
  std::atomic<bool> is_written{false}, may_go{false};

  const int races = races_of([&] {
    run_in(writer, [&] { value = 1; });
    ASSERT_EQ(cudaEventRecord(reused, writer), cudaSuccess);
    run_in(writer, [&] {
      is_written.store(true, std::memory_order_relaxed);
      while (!may_go.load(std::memory_order_relaxed)) std::this_thread::yield();
    });
    while (!is_written.load(std::memory_order_relaxed)) std::this_thread::yield();
    ASSERT_EQ(cudaStreamQuery(writer), cudaErrorNotReady);
    ASSERT_EQ(cudaEventRecord(reused, reader), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(other, writer), cudaSuccess);
    ASSERT_EQ(cudaEventQuery(other), cudaErrorNotReady);
    run_in(reader, [] { value += 1; });
    ASSERT_EQ(cudaStreamSynchronize(reader), cudaSuccess);
    may_go.store(true, std::memory_order_relaxed);
    ASSERT_EQ(cudaStreamSynchronize(writer), cudaSuccess);
  });

  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(Streams, WaitIsForTheRecordOfItsTime) {
  cudaStream_t first = stream(), second = stream(), third = stream();
  cudaEvent_t done = event();
  std::atomic<bool> may_go{false}, is_done{false};
  run_in(first, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  ASSERT_EQ(cudaEventRecord(done, first), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(third, done, 0), cudaSuccess);
  run_in(third, [&] { is_done.store(true); });

  ASSERT_EQ(cudaEventRecord(done, second), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(done), cudaSuccess) << "the latest record is of second";

  EXPECT_FALSE(is_done.load()) << "third waits for the record of first";
  may_go.store(true);
  EXPECT_EQ(cudaStreamSynchronize(third), cudaSuccess);
  EXPECT_TRUE(is_done.load());
}

TEST_F(Streams, EventsTellTimeWhereTheyWereMadeFor) {
  cudaStream_t work = stream();
  cudaEvent_t begin = event(cudaEventDefault), end = event(cudaEventDefault), plain = event();
  ASSERT_EQ(cudaEventRecord(begin, work), cudaSuccess);
  run_in(work, [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  ASSERT_EQ(cudaEventRecord(end, work), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(plain, work), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(end), cudaSuccess);

  float ms = 0;

  EXPECT_EQ(cudaEventElapsedTime(&ms, begin, end), cudaSuccess);
  EXPECT_GE(ms, 3.0f);
  EXPECT_EQ(cudaEventElapsedTime(&ms, begin, plain), cudaErrorInvalidResourceHandle);
}

TEST_F(Streams, DestroyingOneLetsItsWorkFinish) {
  cudaStream_t work = nullptr;
  std::atomic<bool> may_go{false}, is_done{false};
  ASSERT_EQ(cudaStreamCreateWithPriority(&work, cudaStreamNonBlocking, -1), cudaSuccess);
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  run_in(work, [&] { is_done.store(true); });

  EXPECT_EQ(cudaStreamDestroy(work), cudaSuccess) << "waits for nothing";

  EXPECT_FALSE(is_done.load());
  may_go.store(true);
  wait_for_workers();
  EXPECT_TRUE(is_done.load());
}

TEST_F(Streams, SynchronousCopiesWaitForBlockingStreamsOnly) {
  cudaStream_t blocking = stream(cudaStreamDefault), other = stream();
  std::atomic<bool> may_go{false};
  auto* value = device_memory<int>(1);
  run_in(other, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  ASSERT_EQ(cudaMemsetAsync(value, 0, sizeof(int), blocking), cudaSuccess);
  run_in(blocking, [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  launch_add_one(value, 1, blocking);
  int result = -1;

  EXPECT_EQ(cudaMemcpy(&result, value, sizeof(int), cudaMemcpyDeviceToHost), cudaSuccess);

  EXPECT_EQ(result, 1);
  may_go.store(true);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
}

TEST_F(Streams, DefaultStreamsAreRefused) {
  auto* value = device_memory<int>(1);
  for (cudaStream_t none : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread}) {
    EXPECT_EQ(cudaMemsetAsync(value, 0, sizeof(int), none), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamSynchronize(none), cudaErrorInvalidResourceHandle);
  }
  cuda_host::Executor executor;
  EXPECT_EQ(cudaStreamSynchronize(&executor), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Streams, LaunchesNeedTheirDeviceAndAShapeItTakes) {
  cudaStream_t work = stream();
  auto* values = device_memory<int>(1);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_THROW(launch_add_one(values, 1, work), InternalError);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_THROW(cuda::launch(add_one, dim3(1), dim3(1025), 0, work, values, 1), InternalError);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  set_machine({.compute_major = 8, .shared_bytes_per_block = 163 * 1024});
  EXPECT_THROW(cuda::launch(add_one, dim3(1), dim3(1), 163 * 1024 + 1, work, values, 1),
               InternalError);
  EXPECT_NO_THROW(cuda::launch(add_one, dim3(1), dim3(1), 163 * 1024, work, values, 0));
  EXPECT_EQ(cudaStreamSynchronize(work), cudaSuccess);
}

TEST_F(Streams, EventsBelongToADevice) {
  cudaStream_t work = stream();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaEvent_t elsewhere = event();

  EXPECT_EQ(cudaEventRecord(elsewhere, work), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamWaitEvent(work, elsewhere, 0), cudaSuccess) << "any stream may wait";
}

TEST_F(Streams, KernelThatFailsEndsItsDevice) {
  cudaStream_t work = stream();
  auto* values = device_memory<int>(1);
  cudaEvent_t after = event();
  fail_after("kernel", 1, cudaErrorIllegalAddress);
  bool has_run = false;
  std::atomic<bool> may_go{false};
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  launch_add_one(values, 1, work);
  run_in(work, [&] { has_run = true; });
  ASSERT_EQ(cudaEventRecord(after, work), cudaSuccess);
  may_go.store(true);

  EXPECT_EQ(cudaStreamSynchronize(work), cudaErrorIllegalAddress);

  EXPECT_FALSE(has_run);
  EXPECT_EQ(cudaEventQuery(after), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamQuery(work), cudaErrorIllegalAddress);
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, 1), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress) << "for good";
  EXPECT_THROW(launch_add_one(values, 1, work), InternalError);
  ASSERT_EQ(cudaSetDevice(1), cudaErrorIllegalAddress);
  reset();
  EXPECT_EQ(cudaStreamSynchronize(work), cudaSuccess);
}

__global__ void wait_apart() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncwarp();
    cuda_host::barrier_sync(3, 64, "named barrier");
  }
}

TEST_F(Streams, KernelErrorsSayWhatTheKernelDid) {
  cudaStream_t work = stream();

  cuda::launch(wait_apart, dim3(1), dim3(64), 0, work);

  EXPECT_EQ(cudaStreamSynchronize(work), cudaErrorLaunchFailure);
  const std::string text = cudaGetErrorString(cudaErrorLaunchFailure);
  EXPECT_NE(text.find("unspecified launch failure"), std::string::npos);
  EXPECT_NE(text.find("deadlock: threads 0-31 wait at __syncthreads"), std::string::npos) << text;
}

}  // namespace
}  // namespace cpattn::fake_cuda
