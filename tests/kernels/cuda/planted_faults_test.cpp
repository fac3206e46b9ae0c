// One kernel with the usual parts (double-buffered copies, barriers, shuffles), one fault at a time
// planted in it, and which way of executing it must notice.
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/cuda/ptx.h"
#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::Options;
using cuda_host::ThreadOrder;

enum class Fault {
  none,
  no_barrier_after_wait,
  no_barrier_before_overwrite,
  wait_for_too_few,
  shuffle_left_out,
  shuffle_in_a_branch,
  barrier_for_some_warps,
  last_row_not_guarded,
  write_behind_shared_memory,
};

constexpr int kThreads = 96, kTileBytes = kThreads * 16;

/// sums[i] = sum of the rows i, i + 96, ... of the input, total their sums by warps; a thread reads
/// what another one has loaded.
template <Fault kFault>
__global__ void sum_tiles(const float* input, int num_rows, float* sums, float* total) {
  CP_DYNAMIC_SMEM(memory);
  const int me = static_cast<int>(threadIdx.x), other = kThreads - 1 - me;
  const int num_tiles = (num_rows + kThreads - 1) / kThreads;
  const ptx::SharedAddress base = ptx::shared_address(memory);
  const auto load = [&](int tile) {
    const int row = tile * kThreads + me;
    const bool is_inside =
        kFault == Fault::last_row_not_guarded ? tile < num_tiles : row < num_rows;
    ptx::copy_async16(base + static_cast<unsigned>(tile % 2 * kTileBytes + me * 16),
                      input + 4 * (is_inside ? row : 0), is_inside);
    ptx::commit_copies();
  };
  float sum = 0.0f;
  load(0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    load(tile + 1);
    ptx::wait_copies<kFault == Fault::wait_for_too_few ? 2 : 1>();
    if (kFault == Fault::barrier_for_some_warps) {
      if (me < 64) __syncthreads();
    } else if (kFault != Fault::no_barrier_after_wait) {
      __syncthreads();
    }
    const auto* row = reinterpret_cast<const float*>(memory + tile % 2 * kTileBytes + other * 16);
    for (int i = 0; i < 4; ++i) sum += row[i];
    if (kFault != Fault::no_barrier_before_overwrite) __syncthreads();
  }
  ptx::wait_copies<0>();
  if (kFault == Fault::write_behind_shared_memory && me == kThreads - 1) {
    memory[2 * kTileBytes] = std::byte{0};
  }
  sums[other] = sum;
  if (kFault == Fault::shuffle_in_a_branch && me % 32 >= 16) return;
  constexpr int kLast = kFault == Fault::shuffle_left_out ? 2 : 1;
  for (int distance = 16; distance >= kLast; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  if (me % 32 == 0) total[me / 32] = sum;
}

class PlantedFaults : public HostTest {
 protected:
  static constexpr int kRows = 3 * kThreads + 10;

  PlantedFaults() : input_(new float[4 * kRows]) {
    for (int i = 0; i < 4 * kRows; ++i) input_[i] = static_cast<float>(i % 31);
  }

  /// Whether the run stops with a message or gives other numbers than it should.
  template <Fault kFault>
  bool is_caught(const Options& options) {
    executor_.set_options(options);
    std::vector<float> sums(kThreads), total(3);
    const std::string message = problem(sum_tiles<kFault>, dim3(1), dim3(kThreads), 2 * kTileBytes,
                                        input_.get(), kRows, sums.data(), total.data());
    if (!message.empty()) return true;
    float expected_total = 0.0f, given_total = 0.0f;
    for (int thread = 0; thread < kThreads; ++thread) {
      float expected = 0.0f;
      for (int row = thread; row < kRows; row += kThreads) {
        for (int i = 0; i < 4; ++i) expected += input_[4 * row + i];
      }
      if (sums[static_cast<std::size_t>(thread)] != expected) return true;
      expected_total += expected;
    }
    for (const float part : total) given_total += part;
    return given_total != expected_total;  // integers: exact in any order
  }

  template <Fault kFault>
  int num_caught_random(Landing landing) {
    int caught = 0;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      caught += is_caught<kFault>({.order = ThreadOrder::random, .seed = seed, .landing = landing});
    }
    return caught;
  }

  std::unique_ptr<float[]> input_;
};

constexpr Options kEarly{}, kLate{.landing = Landing::late};

TEST_F(PlantedFaults, TheKernelItselfIsRight) {
  EXPECT_FALSE(is_caught<Fault::none>(kEarly));
  EXPECT_FALSE(is_caught<Fault::none>(kLate));
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::early), 0);
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::late), 0);
}

TEST_F(PlantedFaults, MissingBarriers) {
  int races = races_of([&] {
    EXPECT_TRUE(is_caught<Fault::no_barrier_after_wait>(kEarly));
    EXPECT_TRUE(is_caught<Fault::no_barrier_after_wait>(kLate));
    EXPECT_EQ(num_caught_random<Fault::no_barrier_after_wait>(Landing::early), 3);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
  races = races_of([&] {
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_overwrite>(Landing::early), 3);
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_overwrite>(Landing::late), 3);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(PlantedFaults, AWaitForTooFewShowsOnlyWhenCopiesLandLate) {
  EXPECT_FALSE(is_caught<Fault::wait_for_too_few>(kEarly));
  EXPECT_TRUE(is_caught<Fault::wait_for_too_few>(kLate));
}

TEST_F(PlantedFaults, Shuffles) {
  EXPECT_TRUE(is_caught<Fault::shuffle_left_out>(kEarly));
  EXPECT_TRUE(is_caught<Fault::shuffle_in_a_branch>(kEarly));
  EXPECT_EQ(num_caught_random<Fault::shuffle_in_a_branch>(Landing::early), 3);
}

TEST_F(PlantedFaults, ABarrierThatOneWarpPassesBy) {
  races_of([&] {
    EXPECT_TRUE(is_caught<Fault::barrier_for_some_warps>(kEarly));
    EXPECT_EQ(num_caught_random<Fault::barrier_for_some_warps>(Landing::early), 3);
  });
}

TEST_F(PlantedFaults, AccessesOutsideOfMemory) {
  if (kFindsBadAddresses) {
    EXPECT_DEATH(is_caught<Fault::last_row_not_guarded>(kEarly), "heap-buffer-overflow");
    EXPECT_DEATH(is_caught<Fault::last_row_not_guarded>(kLate), "heap-buffer-overflow");
    EXPECT_DEATH(is_caught<Fault::write_behind_shared_memory>(kEarly), "AddressSanitizer");
  } else {
    EXPECT_TRUE(is_caught<Fault::write_behind_shared_memory>(kEarly));
    EXPECT_TRUE(is_caught<Fault::write_behind_shared_memory>(kLate));
  }
}

}  // namespace
}  // namespace cpattn::cuda
