#include "kernels/cuda/ptx_sm90.h"

#include <vector>

#include "kernels/cuda/tensor_map.h"
#include "tests/kernels/cuda/conformance_sm90.cuh"
#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

class Hopper : public HostTest {};

/// The conformance report shows that all layouts agree; this shows with what.
template <int N, class T, Swizzle kSwizzle, bool IsATransposed, bool IsBTransposed,
          bool InRegisters>
void expect_product(HostTest&, cudaStream_t stream) {
  std::vector<std::uint32_t> out(std::size_t{N / 2 * 128});
  launch(product_kernel<N, T, kSwizzle, IsATransposed, IsBTransposed, InRegisters>, dim3(1),
         dim3(128), kProductSharedBytes<N>, stream, out.data());
  for (unsigned t = 0; t < 128; ++t) {
    for (unsigned e = 0; e < N / 2; ++e) {
      const unsigned m = 16 * (t / 32) + t % 32 / 4 + 8 * (e / 2 % 2);
      const unsigned n = 8 * (e / 4) + 2 * (t % 4) + e % 2;
      float expected = 0.0f;  // twice the product; exact
      for (unsigned k = 0; k < kDepth; ++k) expected += 2.0f * a_element(m, k) * b_element(n, k);
      ASSERT_EQ(__uint_as_float(out[e * 128 + t]), expected) << m << ", " << n;
    }
  }
}

TEST_F(Hopper, ProductsAreTheProducts) {
  in_all_modes([&] {
    expect_product<64, bf16, Swizzle::bytes128, false, false, false>(*this, &executor_);
    expect_product<256, f16, Swizzle::bytes128, true, true, false>(*this, &executor_);
    expect_product<176, bf16, Swizzle::bytes64, true, false, false>(*this, &executor_);
    expect_product<96, bf16, Swizzle::bytes32, false, true, true>(*this, &executor_);
  });
}

/// What a load must leave in shared memory, by the definition of a box.
TEST_F(Hopper, TilesAreTheBoxSwizzled) {
  constexpr int kX = -3, kY = 20, kZ = 1;
  constexpr int kShape[3] = {70, 40, 2}, kRow = 160, kPlane = 6400;
  std::vector<std::uint32_t> source(2 * kPlane / 4 + 4);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = 2 * i | (2 * i + 1) << 16;
  const auto* elements = reinterpret_cast<const std::uint16_t*>(source.data());
  const TensorMap map = make_tensor_map({.data = source.data(),
                                         .rank = 3,
                                         .shape = {kShape[0], kShape[1], kShape[2]},
                                         .strides_bytes = {0, kRow, kPlane},
                                         .box = {64, 32, 1},
                                         .swizzle = Swizzle::bytes128});
  in_all_modes([&] {
    std::vector<std::uint32_t> out(kTileBytes / 4);
    run(tile_kernel<3>, dim3(1), dim3(128), kTileBytes + 8, map, kX, kY, kZ, 0, out.data());
    const auto* tile = reinterpret_cast<const std::uint16_t*>(out.data());
    for (int y = 0; y < 32; ++y) {
      for (int x = 0; x < 64; ++x) {
        const int at_x = kX + x, at_y = kY + y;
        const bool is_inside = at_x >= 0 && at_x < kShape[0] && at_y < kShape[1];
        const int expected = is_inside ? elements[(kZ * kPlane + at_y * kRow) / 2 + at_x] : 0;
        const unsigned place = swizzled(static_cast<unsigned>(y * 128 + x * 2), Swizzle::bytes128);
        ASSERT_EQ(tile[place / 2], expected) << x << ", " << y;
      }
    }
  });
}

TEST_F(Hopper, BytesComeAsTheyAre) {
  std::vector<std::uint32_t> source(kTileBytes / 4);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = i;
  const auto* from = reinterpret_cast<const std::byte*>(source.data());
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(from) % 16, 0u);
  in_all_modes([&] {
    std::vector<std::uint32_t> out(source.size());
    run(bytes_kernel<1040>, dim3(1), dim3(128), kTileBytes + 8, from, out.data());
    for (std::uint32_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], (i + 260) % 1024) << i;
  });
}

__global__ void load_some_bytes(const std::byte* from, unsigned offset, unsigned num_bytes,
                                std::uint32_t* seen) {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress to = ptx::shared_address(memory) + 64, barrier = to - 64;
  ptx::mbarrier_init(barrier, 1);
  ptx::mbarrier_arrive_expect_bytes(barrier, num_bytes);
  ptx::load_bytes(to + offset, from, num_bytes, barrier);
  *seen = *reinterpret_cast<const std::uint32_t*>(memory + 64);
  ptx::mbarrier_wait(barrier, 0);
}

TEST_F(Hopper, BytesThatBulkCopiesDoNotTakeAreReported) {
  alignas(16) static const std::byte source[64] = {};
  std::uint32_t seen = 0;
  const auto message = [&](const std::byte* from, unsigned offset, unsigned num_bytes) {
    return problem(load_some_bytes, dim3(1), dim3(1), 128, from, offset, num_bytes, &seen);
  };
  in_all_modes([&] {
    EXPECT_EQ(message(source, 0, 64), "");
    const bool is_late = executor_.options().landing == cuda_host::Landing::late;
    EXPECT_EQ(seen, is_late ? 0xffffffffu : 0u);
    EXPECT_PRED2(contains, message(source + 8, 0, 16), "global address is not a multiple of 16");
    EXPECT_PRED2(contains, message(source, 0, 24), "24 bytes; no multiple of 16");
    EXPECT_PRED2(contains, message(source, 8, 16), "needs a multiple of 16");
    EXPECT_PRED2(contains, message(source, 16, 64), "shared addresses");
  });
}

TEST_F(Hopper, TensorsThatTmaDoesNotTakeAreRefused) {
  alignas(16) static std::uint32_t data[64];
  const TiledTensor good{.data = data,
                         .shape = {64, 4},
                         .strides_bytes = {0, 128},
                         .box = {64, 4},
                         .swizzle = Swizzle::bytes128};
  EXPECT_NO_THROW(make_tensor_map(good));
  const auto refusal = [&](auto change) -> std::string {
    TiledTensor tensor = good;
    change(tensor);
    try {
      make_tensor_map(tensor);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.data = data + 1; }), "multiple of 16");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.rank = 5; }), "5 dimensions");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.shape[1] = 0; }), "shape[1] is 0");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.box[1] = 257; }), "box[1] is 257");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.strides_bytes[1] = 136; }), "136 bytes");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) { it.box[0] = 32; }),
               "rows of 64 bytes; this swizzle permutes rows of 128");
  EXPECT_PRED2(contains, refusal([](TiledTensor& it) {
                 it.swizzle = Swizzle::none;
                 it.box[0] = 4;
               }),
               "rows of 8 bytes");
}

/// A ring of two stages: one warp loads tiles, a warpgroup adds them up.
template <bool WaitsForEmpty, bool WaitsForFull, int ExpectedBytes>
__global__ void ring_kernel(const __grid_constant__ TensorMap map, int num_tiles, float* sums) {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress base = ptx::shared_address(memory);
  const auto full = [&](int stage) { return base + 8192 + 8 * static_cast<unsigned>(stage); };
  const auto empty = [&](int stage) { return full(stage) + 16; };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), 128);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    ptx::decrease_registers<24>();
    for (int i = 0; threadIdx.x == 128 && i < num_tiles; ++i) {
      const int stage = i % 2;
      // The first round finds the stages free: the phase before the first has the odd parity.
      if (WaitsForEmpty) ptx::mbarrier_wait(empty(stage), static_cast<unsigned>(i / 2 + 1) % 2);
      ptx::mbarrier_arrive_expect_bytes(full(stage), ExpectedBytes);
      ptx::load_tile(base + static_cast<unsigned>(stage) * 4096, map, full(stage), 0, 32 * i);
    }
    return;
  }
  ptx::increase_registers<240>();
  float sum = 0.0f;
  for (int i = 0; i < num_tiles; ++i) {
    const int stage = i % 2;
    if (WaitsForFull) ptx::mbarrier_wait(full(stage), static_cast<unsigned>(i / 2) % 2);
    const auto* tile = reinterpret_cast<const float*>(memory + stage * 4096);
    for (unsigned k = threadIdx.x; k < 1024; k += 128) sum += tile[k];
    ptx::mbarrier_arrive(empty(stage));
  }
  sums[threadIdx.x] = sum;
}

class Ring : public Hopper {
 protected:
  static constexpr int kTiles = 7;

  Ring() : numbers_(kTiles * 1024), sums_(128) {
    for (std::size_t i = 0; i < numbers_.size(); ++i) numbers_[i] = static_cast<float>(i % 97);
    map_ = make_tensor_map({.data = numbers_.data(),
                            .element_bytes = 4,
                            .shape = {32, 32 * kTiles},
                            .strides_bytes = {0, 128},
                            .box = {32, 32},
                            .swizzle = Swizzle::bytes128});
  }

  template <class Kernel>
  std::string run_ring(Kernel kernel) {
    return problem(kernel, dim3(1), dim3(256), 8192 + 32, map_, kTiles, sums_.data());
  }
  /// By a message, by wrong numbers or, with the thread sanitizer, as a race.
  template <class Kernel>
  void expect_caught(Kernel kernel) {
    std::string message;
    const int races = races_of([&] { message = run_ring(kernel); });
    EXPECT_TRUE(!message.empty() || total() != expected_total() || races > 0);
  }
  float total() const {
    float sum = 0.0f;
    for (const float part : sums_) sum += part;
    return sum;
  }
  float expected_total() const {
    float sum = 0.0f;
    for (const float number : numbers_) sum += number;
    return sum;
  }

  std::vector<float> numbers_, sums_;
  TensorMap map_;
};

TEST_F(Ring, BarriersHandTilesOver) {
  in_all_modes([&] {
    EXPECT_EQ(run_ring(ring_kernel<true, true, 4096>), "");
    EXPECT_EQ(total(), expected_total());  // integers: exact in any order
  });
}

TEST_F(Ring, AWrongByteCountWaitsForEver) {
  in_all_modes([&] {
    EXPECT_PRED2(contains, run_ring(ring_kernel<true, true, 4096 + 16>), "deadlock: threads 0-127");
    EXPECT_PRED2(contains, run_ring(ring_kernel<true, true, 4096 + 16>), "wait at mbarrier");
  });
}

TEST_F(Ring, WithoutWaitingForEmptyTilesAreOverwritten) {
  expect_caught(ring_kernel<false, true, 4096>);
}

TEST_F(Ring, WithoutWaitingForFullTilesAreNotThereYet) {
  expect_caught(ring_kernel<true, false, 4096>);
}

/// P to shared memory, then P B: with or without what a device needs between.
template <bool HasBarrier, bool HasWait, bool HasFence = true>
__global__ void second_product_kernel(std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  using Layout = Panels<Swizzle::bytes128, false>;
  const unsigned thread = threadIdx.x;
  for (unsigned i = thread; i < 64 * kDepth; i += 128) {
    *reinterpret_cast<std::uint16_t*>(memory + 8192 + 2 * i) = 0x3f80;  // B: ones
    // Rows of other warps as well: only a barrier makes them all visible.
    const unsigned row = i % 64, column = i / 64;
    *reinterpret_cast<std::uint16_t*>(memory + Layout::offset(row, column, 64)) = 0x3f80;
  }
  ptx::fence_async_proxy();
  if (HasBarrier) __syncthreads();
  float d[32] = {};
  if (HasFence) ptx::products_fence();
  for (unsigned k = 0; k < kDepth; k += 16) {
    ptx::start_product<64, false, false>(
        d, Layout::descriptor(ptx::shared_address(memory), k, 64),
        Layout::descriptor(ptx::shared_address(memory) + 8192, k, 64), true, bf16{});
  }
  ptx::commit_products();
  if (HasWait) ptx::wait_products<0>();
  for (unsigned e = 0; e < 32; ++e) out[e * 128 + thread] = __float_as_uint(d[e]);
}

TEST_F(Hopper, AMissingBarrierBeforeAProductIsARace) {
  std::vector<std::uint32_t> out(32 * 128);
  const auto run_with = [&](auto kernel) {
    return problem(kernel, dim3(1), dim3(128), 16384, out.data());
  };
  in_all_modes([&] {
    EXPECT_EQ(run_with(second_product_kernel<true, true>), "");
    for (const std::uint32_t word : out) EXPECT_EQ(__uint_as_float(word), 64.0f);
  });
  // The product is a rendezvous here, so only the thread sanitizer sees that nothing ordered the
  // writes before it.
  const int races = races_of([&] { run_with(second_product_kernel<false, true>); });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(Hopper, AMissingWaitForAProductIsFound) {
  std::vector<std::uint32_t> out(32 * 128);
  in_all_modes([&] {
    EXPECT_PRED2(contains,
                 problem(second_product_kernel<true, false>, dim3(1), dim3(128), 16384, out.data()),
                 "products (wgmma) it never waited for");
  });
}

TEST_F(Hopper, AMissingFenceBeforeAProductIsFound) {
  std::vector<std::uint32_t> out(32 * 128);
  in_all_modes([&] {
    const auto kernel = second_product_kernel<true, true, false>;
    EXPECT_PRED2(contains, problem(kernel, dim3(1), dim3(128), 16384, out.data()), "no fence");
  });
}

__global__ void use_before_init() {
  CP_DYNAMIC_SMEM(memory);
  ptx::mbarrier_arrive(ptx::shared_address(memory));
}
__global__ void arrive_too_often() {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress at = ptx::shared_address(memory);
  ptx::mbarrier_init(at, 1);
  ptx::mbarrier_arrive_expect_bytes(at, 16);
  ptx::mbarrier_arrive(at);
}
__global__ void disagree(unsigned odd_thread, float* out) {
  CP_DYNAMIC_SMEM(memory);
  float d[32] = {};
  const std::uint64_t at =
      ptx::matrix_descriptor(ptx::shared_address(memory), 16, 1024, Swizzle::bytes128);
  ptx::products_fence();
  ptx::start_product<64, false, false>(d, at, at, threadIdx.x != odd_thread, bf16{});
  ptx::commit_products();
  ptx::wait_products<0>();
  out[threadIdx.x] = d[0];
}

TEST_F(Hopper, WhatIsUndefinedOnTheDeviceIsReported) {
  std::vector<float> out(128);
  in_all_modes([&] {
    EXPECT_PRED2(contains, problem(use_before_init, dim3(1), dim3(1), 8), "was not initialised");
    EXPECT_PRED2(contains, problem(arrive_too_often, dim3(1), dim3(1), 8), "more than the 1");
    EXPECT_PRED2(contains, problem(disagree, dim3(1), dim3(128), 16384, 77u, out.data()),
                 "threads of the warpgroup disagree");
    EXPECT_PRED2(contains, problem(disagree, dim3(1), dim3(96), 16384, 128u, out.data()),
                 "96 threads end within this thread's warpgroup");
    EXPECT_PRED2(contains, problem(disagree, dim3(1), dim3(128), 2048, 128u, out.data()),
                 "shared addresses");
  });
}

}  // namespace
}  // namespace cpattn::cuda
