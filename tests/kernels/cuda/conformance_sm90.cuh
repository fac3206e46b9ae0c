// The kernels behind report_sm90: products of every shape and layout, tiles of every rank, bytes.
#pragma once

#include "kernels/cuda/ptx_sm90.h"

namespace cpattn::cuda {

inline constexpr int kDepth = 64;  // k of a whole product: four instructions

/// A matrix [outer][k] (or [k][outer], transposed) of 64 k in shared memory as wgmma reads it:
/// panels as wide as the swizzle.
template <Swizzle kSwizzle, bool IsTransposed>
struct Panels {
  static constexpr unsigned kWidth = width_bytes(kSwizzle), kPerRow = kWidth / 2;

  /// Offset of an element, swizzled; the matrix begins at a multiple of 1024.
  static CP_DEVICE unsigned offset(unsigned outer, unsigned k, unsigned num_outer) {
    const unsigned plain =
        IsTransposed ? outer / kPerRow * kDepth * kWidth + k * kWidth + outer % kPerRow * 2
                     : k / kPerRow * num_outer * kWidth + outer * kWidth + k % kPerRow * 2;
    return swizzled(plain, kSwizzle);
  }

  /// Of the instruction for k from `k` on.
  static CP_DEVICE std::uint64_t descriptor(ptx::SharedAddress base, unsigned k,
                                            unsigned num_outer) {
    const unsigned start =
        IsTransposed ? k * kWidth : k / kPerRow * num_outer * kWidth + k % kPerRow * 2;
    return ptx::matrix_descriptor(base + start, kDepth * kWidth, 8 * kWidth, kSwizzle);
  }
};

/// Integers small enough for exact sums.
CP_DEVICE float a_element(unsigned m, unsigned k) {
  return static_cast<float>((m * 7 + k * 3 + m * k) % 15) - 7.0f;
}
CP_DEVICE float b_element(unsigned n, unsigned k) {
  return static_cast<float>((n * 5 + k * 11 + n * k) % 13) - 6.0f;
}

template <int N>
inline constexpr std::size_t kProductSharedBytes = (64 + N) * kDepth * 2;

/// Two products after one another: d = A B, then d += A B. out[e * 128 + thread].
template <int N, class T, Swizzle kSwizzle, bool IsATransposed, bool IsBTransposed,
          bool IsAInRegisters>
__global__ void __launch_bounds__(128) product_kernel(std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  using A = Panels<kSwizzle, IsATransposed>;
  using B = Panels<kSwizzle, IsBTransposed>;
  std::byte* a = memory;
  std::byte* b = memory + 64 * kDepth * 2;
  const unsigned thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto put = [](std::byte* at, float value) {
    *reinterpret_cast<std::uint16_t*>(at) = static_cast<std::uint16_t>(ptx::pack(value, 0.0f, T{}));
  };
  for (unsigned i = thread; i < 64 * kDepth; i += 128) {
    put(a + A::offset(i / kDepth, i % kDepth, 64), a_element(i / kDepth, i % kDepth));
  }
  for (unsigned i = thread; i < N * kDepth; i += 128) {
    put(b + B::offset(i / kDepth, i % kDepth, N), b_element(i / kDepth, i % kDepth));
  }
  ptx::fence_async_proxy();
  __syncthreads();
  std::uint32_t rows[kDepth / 16][4];
  const unsigned g = 16 * warp + lane / 4, t = lane % 4;
  CP_UNROLL
  for (unsigned k = 0; k < kDepth; k += 16) {
    CP_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned m = g + 8 * (i % 2), first = k + 2 * t + 8 * (i / 2);
      rows[k / 16][i] = ptx::pack(a_element(m, first), a_element(m, first + 1), T{});
    }
  }
  float d[N / 2];
  ptx::products_fence();
  CP_UNROLL
  for (int repeat = 0; repeat < 2; ++repeat) {
    CP_UNROLL
    for (unsigned k = 0; k < kDepth; k += 16) {
      const bool accumulates = repeat > 0 || k > 0;
      const std::uint64_t b_at = B::descriptor(ptx::shared_address(b), k, N);
      if constexpr (IsAInRegisters) {
        ptx::start_product<N, IsBTransposed>(d, rows[k / 16], b_at, accumulates, T{});
      } else {
        const std::uint64_t a_at = A::descriptor(ptx::shared_address(a), k, 64);
        ptx::start_product<N, IsATransposed, IsBTransposed>(d, a_at, b_at, accumulates, T{});
      }
    }
  }
  ptx::commit_products();
  ptx::wait_products<0>();
  CP_UNROLL
  for (int e = 0; e < N / 2; ++e) out[e * 128 + thread] = __float_as_uint(d[e]);
}

inline constexpr unsigned kTileBytes = 4096;

/// One tile of `rank` dimensions, then shared memory as it lies.
template <int Rank>
__global__ void __launch_bounds__(128) tile_kernel(const __grid_constant__ TensorMap map, int x,
                                                   int y, int z, int w, std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress tile = ptx::shared_address(memory), barrier = tile + kTileBytes;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(map);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_bytes(barrier, kTileBytes);
    if constexpr (Rank == 2) ptx::load_tile(tile, map, barrier, x, y);
    if constexpr (Rank == 3) ptx::load_tile(tile, map, barrier, x, y, z);
    if constexpr (Rank == 4) ptx::load_tile(tile, map, barrier, x, y, z, w);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  const auto* words = reinterpret_cast<const std::uint32_t*>(memory);
  for (unsigned i = threadIdx.x; i < kTileBytes / 4; i += 128) out[i] = words[i];
}

/// Plain bytes in two pieces, the first of kFirst, that change places.
template <unsigned kFirst>
__global__ void __launch_bounds__(128) bytes_kernel(const std::byte* from, std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress to = ptx::shared_address(memory), barrier = to + kTileBytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_bytes(barrier, kTileBytes);
    ptx::load_bytes(to + kTileBytes - kFirst, from, kFirst, barrier);
    ptx::load_bytes(to, from + kFirst, kTileBytes - kFirst, barrier);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  const auto* words = reinterpret_cast<const std::uint32_t*>(memory);
  for (unsigned i = threadIdx.x; i < kTileBytes / 4; i += 128) out[i] = words[i];
}

}  // namespace cpattn::cuda
