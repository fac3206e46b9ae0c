#include "kernels/cuda/host/warp.h"

#include <vector>

#include "kernels/cuda/ptx.h"
#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

class Warp : public HostTest {};

__global__ void shuffle_all(int argument, int width, int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int* mine = out + 4 * threadIdx.x;
  mine[0] = __shfl_sync(0xffffffffu, lane, argument, width);
  mine[1] = __shfl_up_sync(0xffffffffu, lane, static_cast<unsigned>(argument), width);
  mine[2] = __shfl_down_sync(0xffffffffu, lane, static_cast<unsigned>(argument), width);
  mine[3] = __shfl_xor_sync(0xffffffffu, lane, argument, width);
}

/// By the pseudocode of shfl in the PTX ISA: a lane's segment begins at lane & ~(width - 1), and a
/// source outside of the bound on its side is replaced by the lane itself.
std::vector<int> expected_shuffles(int lane, int argument, int width) {
  const int begin = lane / width * width, end = begin + width;
  const int up = lane - argument, down = lane + argument, butterfly = lane ^ argument;
  return {begin + argument % width, up < begin ? lane : up, down >= end ? lane : down,
          butterfly >= end ? lane : butterfly};
}

TEST_F(Warp, ShufflesOfEveryWidth) {
  in_all_modes([&] {
    for (const int width : {1, 2, 4, 8, 16, 32}) {
      for (const int argument : {0, 1, 3, 5, 16, 31}) {
        std::vector<int> out(4 * 64);
        run(shuffle_all, dim3(1), dim3(64), 0, argument, width, out.data());
        for (int i = 0; i < 64; ++i) {
          const auto first = out.begin() + 4 * i;
          EXPECT_EQ(std::vector<int>(first, first + 4), expected_shuffles(i % 32, argument, width))
              << "lane " << i % 32 << ", argument " << argument << ", width " << width;
        }
      }
    }
  });
}

__global__ void shuffle_double(double* out) {
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 0.1 * threadIdx.x, 31);
}

TEST_F(Warp, EightBytesTravelWhole) {
  std::vector<double> out(32);
  run(shuffle_double, dim3(1), dim3(32), 0, out.data());
  for (unsigned i = 0; i < 32; ++i) EXPECT_EQ(out[i], 0.1 * (31 - i));
}

/// The halves of a warp go different ways at the same time, then meet.
__global__ void two_masks(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int value = lane;
  if (lane < 16) {
    for (int i = 1; i < 16; i *= 2) value += __shfl_xor_sync(0x0000ffffu, value, i);
  } else {
    value = __shfl_sync(0xffff0000u, value, 20);
  }
  __syncwarp();
  out[lane] = value + static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0) % 1000);
}

TEST_F(Warp, PartsOfAWarpMayGoDifferentWays) {
  int ballot = 0;
  for (int lane = 0; lane < 32; lane += 3) ballot |= 1 << lane;
  const int rest = static_cast<int>(static_cast<unsigned>(ballot) % 1000);
  in_all_modes([&] {
    std::vector<int> out(32);
    run(two_masks, dim3(1), dim3(32), 0, out.data());
    for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], (i < 16 ? 120 : 20) + rest);
  });
}

__global__ void votes(int limit, unsigned* out) {
  const bool is_below = static_cast<int>(threadIdx.x) < limit;
  const unsigned ballot = __ballot_sync(0xffffffffu, is_below);
  const int any = __any_sync(0xffffffffu, is_below), all = __all_sync(0xffffffffu, is_below);
  if (threadIdx.x == 0) {
    out[0] = ballot;
    out[1] = static_cast<unsigned>(any);
    out[2] = static_cast<unsigned>(all);
  }
}

TEST_F(Warp, Votes) {
  std::vector<unsigned> out(3);
  for (const int limit : {0, 1, 31, 32}) {
    run(votes, dim3(1), dim3(32), 0, limit, out.data());
    EXPECT_EQ(out[0], limit == 32 ? 0xffffffffu : (1u << limit) - 1);
    EXPECT_EQ(out[1], limit > 0 ? 1u : 0u);
    EXPECT_EQ(out[2], limit == 32 ? 1u : 0u);
  }
}

__global__ void sync_and_read(int* out) {
  CP_DYNAMIC_SMEM(memory);
  int* shared = reinterpret_cast<int*>(memory);
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

TEST_F(Warp, SyncWarpOrdersMemory) {
  in_all_modes([&] {
    std::vector<int> out(96);
    run(sync_and_read, dim3(1), dim3(96), 96 * sizeof(int), out.data());
    for (int i = 0; i < 96; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], i ^ 1);
  });
}

/// Lanes below `leaving` exit; the others name them in their masks all the same.
__global__ void sum_after_exits(int leaving, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < leaving) return;
  __syncwarp();
  const int last = __shfl_sync(0xffffffffu, lane, 31);
  if (lane == 31) *out = last;
}

TEST_F(Warp, ExitedLanesAreNotWaitedFor) {
  in_all_modes([&] {
    int out = 0;
    run(sum_after_exits, dim3(1), dim3(32), 0, 30, &out);
    EXPECT_EQ(out, 31);
  });
}

__global__ void go_apart(int* out) {
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  }
}
__global__ void forget_a_lane(int* out) {
  if (threadIdx.x == 3) cuda_host::barrier_sync(1, 32, "named barrier");
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void use_wrong_mask() { __syncwarp(0xfffffffeu); }
__global__ void read_beyond_mask(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_xor_sync(0xffu, 1, 8);
}
__global__ void use_odd_width(int* out) { *out = __shfl_sync(0xffffffffu, 1, 0, 12); }
__global__ void multiply_in_part(float* out) {
  if (threadIdx.x >= 31) return;
  float d[4] = {};
  const std::uint32_t a[4] = {};
  ptx::multiply(d, a, 0, 0, bf16{});
  out[threadIdx.x] = d[0];
}

TEST_F(Warp, WhatIsUndefinedOnTheDeviceIsReported) {
  std::vector<int> out(32);
  std::vector<float> wide(32);
  for (const cuda_host::Options& mode : kModes) {
    executor_.set_options(mode);
    const std::string apart = problem(go_apart, dim3(1), dim3(32), 0, out.data());
    EXPECT_PRED2(contains, apart, "divergent warp: lane");
    EXPECT_PRED2(contains, apart, "__syncwarp");
    EXPECT_PRED2(contains, apart, "__shfl_sync");
    EXPECT_PRED2(contains, problem(forget_a_lane, dim3(1), dim3(32), 0, out.data()),
                 "deadlock: threads 0-2 wait at __shfl_xor_sync (0xffffffff); threads 3-3 "
                 "wait at named barrier (0x1); threads 4-31 wait at");
    EXPECT_PRED2(contains, problem(use_wrong_mask, dim3(1), dim3(32), 0),
                 "lane 0 is not in the mask 0xfffffffe it gives");
    EXPECT_PRED2(contains, problem(read_beyond_mask, dim3(1), dim3(32), 0, out.data()),
                 "reads lane 8, which does not take part");
    EXPECT_PRED2(contains, problem(use_odd_width, dim3(1), dim3(32), 0, out.data()),
                 "a width of 12");
    EXPECT_PRED2(contains, problem(multiply_in_part, dim3(1), dim3(32), 0, wide.data()),
                 "lane 31 does not exist or has exited");
    EXPECT_PRED2(contains, problem(multiply_in_part, dim3(1), dim3(24), 0, wide.data()),
                 "lane 24 does not exist or has exited");
  }
}

}  // namespace
}  // namespace cpattn::cuda
