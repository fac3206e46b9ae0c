#include "kernels/cuda/host/executor.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::ThreadOrder;

class Executor : public HostTest {};

__global__ void write_place(int* out) {
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * threads + thread] += static_cast<int>(block * threads + thread);
}

TEST_F(Executor, EveryThreadRunsOnceAtItsPlace) {
  in_all_modes([&] {
    std::vector<int> out(2 * 3 * 2 * 5 * 3 * 4);
    run(write_place, dim3(2, 3, 2), dim3(5, 3, 4), 0, out.data());
    std::vector<int> expected(out.size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(out, expected);
  });
  EXPECT_EQ(executor_.counters().blocks, 12 * kModes.size());
}

__global__ void note_order(int* order, int* count) {
  order[(*count)++] = static_cast<int>(threadIdx.x);  // one thread at a time: no race on the host
}

TEST_F(Executor, OrderIsAscendingOrDrawnFromTheSeed) {
  if (kFindsRaces) return;  // the kernel is a race, which is how it sees the order
  const auto order_with = [&](ThreadOrder order, std::uint64_t seed) {
    executor_.set_options({.order = order, .seed = seed});
    std::vector<int> seen(64);
    int count = 0;
    run(note_order, dim3(1), dim3(64), 0, seen.data(), &count);
    EXPECT_EQ(count, 64);
    return seen;
  };
  const std::vector<int> ascending = order_with(ThreadOrder::ascending, 7);
  EXPECT_TRUE(std::is_sorted(ascending.begin(), ascending.end()));
  const std::vector<int> first = order_with(ThreadOrder::random, 1);
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
  EXPECT_EQ(first, order_with(ThreadOrder::random, 1));
  EXPECT_NE(first, order_with(ThreadOrder::random, 2));
  EXPECT_EQ(std::set<int>(first.begin(), first.end()).size(), 64u);
}

__global__ void reverse(int* out, int rounds) {
  CP_DYNAMIC_SMEM(memory);
  int* shared = reinterpret_cast<int*>(memory);
  const int me = static_cast<int>(threadIdx.x), last = static_cast<int>(blockDim.x) - 1;
  int value = me;
  for (int i = 0; i < rounds; ++i) {
    shared[me] = value + 1;
    __syncthreads();
    value = shared[last - me];
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

TEST_F(Executor, BarrierOrdersTheWholeBlock) {
  in_all_modes([&] {
    std::vector<int> out(3 * 96);
    run(reverse, dim3(3), dim3(96), 96 * sizeof(int), out.data(), 5);
    for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], 95 - i % 96 + 5);
  });
}

__global__ void leave_early(int* out, int num_staying) {
  CP_DYNAMIC_SMEM(memory);
  int* shared = reinterpret_cast<int*>(memory);
  const int me = static_cast<int>(threadIdx.x);
  if (me >= num_staying) return;
  shared[me] = me;
  __syncthreads();
  out[me] = shared[num_staying - 1 - me];
}

TEST_F(Executor, ThreadsThatHaveExitedCountAsArrived) {
  in_all_modes([&] {
    std::vector<int> out(40, -1);
    run(leave_early, dim3(1), dim3(128), 40 * sizeof(int), out.data(), 40);
    for (int i = 0; i < 40; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], 39 - i);
  });
}

/// Warp 0 produces, warp 1 consumes: barrier 1 says full, barrier 2 says empty.
__global__ void hand_over(int* out, int rounds) {
  CP_DYNAMIC_SMEM(memory);
  int* shared = reinterpret_cast<int*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int sum = 0;
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x < 32) {
      if (i > 0) cuda_host::barrier_sync(2, 64, "empty");
      shared[lane] = 100 * i + lane;
      cuda_host::barrier_arrive(1, 64);
    } else {
      cuda_host::barrier_sync(1, 64, "full");
      sum += shared[31 - lane];
      if (i + 1 < rounds) cuda_host::barrier_arrive(2, 64);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

TEST_F(Executor, NamedBarriersOrderAProducerAndAConsumer) {
  in_all_modes([&] {
    std::vector<int> out(32);
    run(hand_over, dim3(1), dim3(64), 32 * sizeof(int), out.data(), 10);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], 4500 + 10 * (31 - i));
  });
}

__global__ void wait_for_flag(int* flag, int* out) {
  if (threadIdx.x == 0) {
    while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0) __nanosleep(20);
    *out = 1;
  } else if (threadIdx.x == 40) {
    __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
  }
}

TEST_F(Executor, APollingThreadLetsOthersRun) {
  in_all_modes([&] {
    int flag = 0, out = 0;
    run(wait_for_flag, dim3(1), dim3(64), 0, &flag, &out);
    EXPECT_EQ(out, 1);
  });
  int flag = 0, out = 0;
  EXPECT_PRED2(contains, problem(wait_for_flag, dim3(1), dim3(32), 0, &flag, &out), "keep polling");
}

__global__ void barrier_for_some(int num_arriving) {
  if (static_cast<int>(threadIdx.x) < num_arriving) {
    __syncthreads();
  } else {
    cuda_host::barrier_sync(3, 64, "named barrier");
  }
}

TEST_F(Executor, ADeadlockSaysWhoWaitsWhere) {
  for (const cuda_host::Options& mode : kModes) {
    executor_.set_options(mode);
    const std::string text = problem(barrier_for_some, dim3(2), dim3(128), 0, 96);
    EXPECT_PRED2(contains, text,
                 "deadlock: threads 0-95 wait at __syncthreads (0x0); "
                 "threads 96-127 wait at named barrier (0x3)");
    EXPECT_PRED2(contains, text, "[block 0 0 0]");
  }
  // And what was left behind does no harm.
  std::vector<int> out(96);
  run(reverse, dim3(1), dim3(96), 96 * sizeof(int), out.data(), 1);
  EXPECT_EQ(out[0], 96);
}

__global__ void barrier_with(int id, int first_count, int second_count) {
  cuda_host::barrier_sync(static_cast<unsigned>(id),
                          static_cast<unsigned>(threadIdx.x < 32 ? first_count : second_count),
                          "named barrier");
}

TEST_F(Executor, MisusedBarriersAreNamed) {
  EXPECT_PRED2(contains, problem(barrier_with, dim3(1), dim3(64), 0, 1, 64, 32),
               "barrier 1 for 32 threads while others use it for 64");
  EXPECT_PRED2(contains, problem(barrier_with, dim3(1), dim3(64), 0, 16, 64, 64),
               "barrier 16 of 16");
  EXPECT_PRED2(contains, problem(barrier_with, dim3(1), dim3(64), 0, 1, 48, 48),
               "48 threads; expected a multiple of 32 up to 64");
}

__global__ void read_shared(std::uint32_t* out, int count, int then_write) {
  CP_DYNAMIC_SMEM(memory);
  const auto* words = reinterpret_cast<const std::uint32_t*>(memory);
  for (int i = 0; i < count; ++i) out[i] &= words[i];
  if (then_write != 0) {
    for (int i = 0; i < count; ++i) reinterpret_cast<std::uint32_t*>(memory)[i] = 0;
  }
  out[count] = reinterpret_cast<std::uintptr_t>(memory) % 1024 == 0 ? 1 : 0;
  out[count + 1] = cuda_host::shared_address(memory);
}

TEST_F(Executor, SharedMemoryHoldsNaNsBeforeEachBlock) {
  std::vector<std::uint32_t> out(102, 0xffffffffu);
  run(read_shared, dim3(4), dim3(1), 400, out.data(), 100, 1);
  EXPECT_EQ(std::vector<std::uint32_t>(100, 0xffffffffu),
            std::vector<std::uint32_t>(out.begin(), out.begin() + 100));
  EXPECT_EQ(out[100], 1u);
  EXPECT_EQ(out[101], cuda_host::kSharedBegin);
}

__global__ void write_byte(int offset) {
  CP_DYNAMIC_SMEM(memory);
  memory[offset] = std::byte{0};
}

TEST_F(Executor, AWriteBehindSharedMemoryIsFound) {
  EXPECT_EQ(problem(write_byte, dim3(1), dim3(1), 100, 99), "");
  if (kFindsBadAddresses) {
    EXPECT_DEATH(run(write_byte, dim3(1), dim3(1), 100, 100), "AddressSanitizer");
  } else {
    EXPECT_PRED2(contains, problem(write_byte, dim3(1), dim3(1), 100, 100),
                 "a write behind the 100 bytes of shared memory");
  }
}

__global__ void overflow_stack(int depth, volatile int* sink) {
  volatile char frame[4096];
  frame[0] = static_cast<char>(depth);
  if (depth > 0) overflow_stack(depth - 1, sink);
  *sink = frame[0];
}

TEST_F(Executor, AStackOverflowFaults) {
  int sink = 0;
  EXPECT_EQ(problem(overflow_stack, dim3(1), dim3(1), 0, 4, &sink), "");
  if (kFindsRaces) return;  // its own handler ends the process as if all were well
  EXPECT_DEATH(run(overflow_stack, dim3(1), dim3(1), 0, 4000, &sink), "");
}

__global__ void do_nothing() {}

TEST_F(Executor, ShapesThatNoDeviceTakesAreRefused) {
  EXPECT_EQ(problem(do_nothing, dim3(1), dim3(1024), 227 * 1024), "");
  for (const dim3 block : {dim3(1025), dim3(0), dim3(1, 1, 65), dim3(32, 33)}) {
    EXPECT_PRED2(contains, problem(do_nothing, dim3(1), block, 0), "at most 1024 threads");
  }
  for (const dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(0x80000000u)}) {
    EXPECT_PRED2(contains, problem(do_nothing, grid, dim3(1), 0), "grid (");
  }
  EXPECT_PRED2(contains, problem(do_nothing, dim3(1), dim3(1), 227 * 1024 + 1), "this device has");
  executor_.set_options({.max_shared_bytes = 99 * 1024});
  EXPECT_PRED2(contains, problem(do_nothing, dim3(1), dim3(1), 100 * 1024), "has 101376");
}

__global__ void launch_inside(cudaStream_t stream) {
  launch(do_nothing, dim3(1), dim3(1), 0, stream);
}

TEST_F(Executor, AKernelCannotLaunch) {
  EXPECT_PRED2(contains, problem(launch_inside, dim3(1), dim3(1), 0, &executor_),
               "a kernel cannot launch kernels [thread 0 0 0] [block 0 0 0]");
}

__global__ void read_argument(const int value, int* out) { *out = value; }

TEST_F(Executor, ArgumentsAreCopiedAtTheLaunch) {
  struct Later final : CUstream_st {
    void launch(const cuda_host::LaunchShape& shape, std::function<void()> thread) override {
      held = [shape, thread] { cuda_host::Executor().launch(shape, thread); };
    }
    std::function<void()> held;
  } later;
  int value = 5, out = 0;
  launch(read_argument, dim3(1), dim3(1), 0, &later, value, &out);
  value = 6;
  later.held();
  EXPECT_EQ(out, 5);
}

}  // namespace
}  // namespace cpattn::cuda
