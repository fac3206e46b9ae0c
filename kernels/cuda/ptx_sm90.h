// PTX of the Hopper path: mbarrier, TMA and wgmma, in two halves as in ptx.h.
//
// wgmma and setmaxnreg exist in code for sm_90a alone; elsewhere they trap, so that one source
// compiles for every architecture. mbarrier and TMA need sm_90 or later.
#pragma once

#include <type_traits>

#include "kernels/cuda/ptx.h"
#include "kernels/cuda/swizzle.h"

#if defined(__CUDACC__)
#include <cuda.h>

#include "kernels/cuda/wgmma_sm90.inc"
#else
#include "kernels/cuda/host/mbarrier.h"
#include "kernels/cuda/host/tile_copies.h"
#include "kernels/cuda/host/wgmma.h"
#endif

namespace cpattn::cuda {

/// What TMA knows about a tensor: made by make_tensor_map (tensor_map.h), given to a kernel as
/// `const __grid_constant__ TensorMap`.
#if defined(__CUDACC__)
using TensorMap = CUtensorMap;
#else
using TensorMap = cuda_host::TensorMap;
#endif

namespace ptx {

/// Where an operand of wgmma lies in shared memory. Its rows are as wide as the swizzle, and eight
/// of them are a pattern, which begins at a multiple of its size.
/// Rows of k (A [m][k], B [n][k]): stride_bytes from one eight of rows to the next; leading_bytes
/// is not used. The next 16 k of a row begin 32 bytes further.
/// Rows of m or n (A [k][m], B [k][n]; "transposed"): leading_bytes from one row's width of m or n
/// to the next, stride_bytes from one eight of k to the next.
CP_DEVICE constexpr std::uint64_t matrix_descriptor(SharedAddress start, unsigned leading_bytes,
                                                    unsigned stride_bytes, Swizzle swizzle) {
  const std::uint64_t mode = swizzle == Swizzle::bytes128  ? 1
                             : swizzle == Swizzle::bytes64 ? 2
                             : swizzle == Swizzle::bytes32 ? 3
                                                           : 0;
  return std::uint64_t{(start & 0x3ffffu) >> 4} |
         std::uint64_t{(leading_bytes & 0x3ffffu) >> 4} << 16 |
         std::uint64_t{(stride_bytes & 0x3ffffu) >> 4} << 32 | mode << 62;
}

#if defined(__CUDACC__)

/// A barrier of num_arrivals in eight bytes at `at`; phases alternate in parity from 0 on. Others
/// may use it after fence_mbarrier_init and a barrier of the block.
CP_DEVICE void mbarrier_init(SharedAddress at, unsigned num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(num_arrivals) : "memory");
}
CP_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CP_DEVICE void mbarrier_arrive(SharedAddress at) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at)
               : "memory");
}
/// Adds to the bytes that the phase waits for, then arrives.
CP_DEVICE void mbarrier_arrive_expect_bytes(SharedAddress at, unsigned num_bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at),
      "r"(num_bytes)
      : "memory");
}
/// Until the phase of this parity is complete.
CP_DEVICE void mbarrier_wait(SharedAddress at, unsigned parity) {
  std::uint32_t is_complete = 0;
  while (is_complete == 0) {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;"
        " selp.u32 %0, 1, 0, done; }"
        : "=r"(is_complete)
        : "r"(at), "r"(parity)
        : "memory");
  }
}

/// What this thread wrote to shared memory is visible to TMA and wgmma afterwards.
CP_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The box of `map` at these coordinates (innermost first) to shared memory; its bytes are reported
/// to the barrier. Elements outside of the tensor are zeros. One thread calls it.
CP_DEVICE void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x,
                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
CP_DEVICE void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x,
                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
CP_DEVICE void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x,
                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
/// `num_bytes` consecutive bytes of global to shared memory, reported to the barrier. Addresses and
/// num_bytes are multiples of 16. One thread calls it.
CP_DEVICE void load_bytes(SharedAddress to, const void* from, unsigned num_bytes,
                          SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(num_bytes), "r"(barrier)
      : "memory");
}
CP_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CP_SM90A_ASM(...) asm volatile(__VA_ARGS__)
#else
#define CP_SM90A_ASM(...) asm volatile("trap;")
#endif

/// Before the first product, and after registers of an accumulator or of A were written.
CP_DEVICE void products_fence() { CP_SM90A_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
CP_DEVICE void commit_products() { CP_SM90A_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// All groups of the warpgroup but the newest NumNewest are complete.
template <int NumNewest>
CP_DEVICE void wait_products() {
  CP_SM90A_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(NumNewest) : "memory");
}

/// The compiler may not move uses of these registers past this point: to it, a product's result is
/// there once the product has started, and its operands are free.
template <class T, std::size_t Count>
CP_DEVICE void hold_registers(T (&registers)[Count]) {
  CP_UNROLL
  for (std::size_t i = 0; i < Count; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

/// Registers of each thread of the warpgroup from here on: a multiple of 8, from 24 to 256.
template <int Count>
CP_DEVICE void increase_registers() {
  CP_SM90A_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
CP_DEVICE void decrease_registers() {
  CP_SM90A_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int N, class T>
struct Wgmma;

#define CP_UNWRAP(...) __VA_ARGS__
#define CP_WGMMA(N, TYPE, REGISTERS, OUTPUTS, P0, P1, P2, P3, P4, P5, P6)                        \
  template <>                                                                                    \
  struct Wgmma<N, TYPE> {                                                                        \
    template <bool IsATransposed, bool IsBTransposed>                                            \
    static CP_DEVICE void start(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,             \
                                int accumulates) {                                               \
      CP_SM90A_ASM("{ .reg .pred p; setp.ne.b32 p, " P2                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE        \
                   " {" REGISTERS "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 "; }"                \
                   : OUTPUTS                                                                     \
                   : "l"(a), "l"(b), "r"(accumulates), "n"(IsATransposed ? 1 : 0),               \
                     "n"(IsBTransposed ? 1 : 0));                                                \
    }                                                                                            \
    template <bool IsBTransposed>                                                                \
    static CP_DEVICE void start(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, \
                                int accumulates) {                                               \
      CP_SM90A_ASM("{ .reg .pred p; setp.ne.b32 p, " P5                                          \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE        \
                   " {" REGISTERS "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6    \
                   "; }"                                                                         \
                   : OUTPUTS                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates),       \
                     "n"(IsBTransposed ? 1 : 0));                                                \
    }                                                                                            \
  };
#define CP_WGMMA_BOTH(N, REGISTERS, OUTPUTS, ...)              \
  CP_WGMMA(N, bf16, REGISTERS, CP_UNWRAP OUTPUTS, __VA_ARGS__) \
  CP_WGMMA(N, f16, REGISTERS, CP_UNWRAP OUTPUTS, __VA_ARGS__)

CP_WGMMA_SHAPES(CP_WGMMA_BOTH)

/// d += A B, or d = A B where !accumulates, for A of 64 x 16 and B of 16 x N: starts it for the
/// calling warpgroup; d belongs to the product until wait_products. N: a multiple of 16 from 64 to
/// 256. Element e of thread t is row 16 (t / 32) + t % 32 / 4 + 8 (e / 2 % 2), column
/// 8 (e / 4) + 2 (t % 4) + e % 2.
template <int N, bool IsATransposed, bool IsBTransposed, class T>
CP_DEVICE void start_product(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool accumulates,
                             T) {
  Wgmma<N, T>::template start<IsATransposed, IsBTransposed>(d, a, b, accumulates ? 1 : 0);
}
/// Likewise with the rows of A that belong to the thread's warp in registers, held as in ptx.h.
template <int N, bool IsBTransposed, class T>
CP_DEVICE void start_product(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                             bool accumulates, T) {
  Wgmma<N, T>::template start<IsBTransposed>(d, a, b, accumulates ? 1 : 0);
}

#else

using cuda_host::mbarrier_arrive;
using cuda_host::mbarrier_arrive_expect_bytes;
using cuda_host::mbarrier_init;
using cuda_host::mbarrier_wait;
inline void fence_mbarrier_init() {}
inline void fence_async_proxy() {}

inline void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x, int y) {
  const std::int32_t first[] = {x, y};
  cuda_host::copy_tile(to, map, first, 2, barrier);
}
inline void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x, int y,
                      int z) {
  const std::int32_t first[] = {x, y, z};
  cuda_host::copy_tile(to, map, first, 3, barrier);
}
inline void load_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int x, int y,
                      int z, int w) {
  const std::int32_t first[] = {x, y, z, w};
  cuda_host::copy_tile(to, map, first, 4, barrier);
}
inline void load_bytes(SharedAddress to, const void* from, unsigned num_bytes,
                       SharedAddress barrier) {
  cuda_host::copy_bytes(to, from, num_bytes, barrier);
}
inline void prefetch_tensor_map(const TensorMap&) {}

inline void products_fence() { cuda_host::fence_products(); }
inline void commit_products() { cuda_host::commit_products(); }
template <int NumNewest>
inline void wait_products() {
  cuda_host::wait_products(NumNewest);
}
template <class T, std::size_t Count>
inline void hold_registers(T (&)[Count]) {}
template <int Count>
inline void increase_registers() {
  cuda_host::set_max_registers(Count);
}
template <int Count>
inline void decrease_registers() {
  cuda_host::set_max_registers(Count);
}

constexpr DType dtype_of(bf16) { return DType::bf16; }
constexpr DType dtype_of(f16) { return DType::f16; }

template <int N, bool IsATransposed, bool IsBTransposed, class T>
inline void start_product(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool accumulates,
                          T type) {
  static_assert(N % 16 == 0 && N >= 64 && N <= 256);
  cuda_host::Product product;
  product.dtype = dtype_of(type);
  product.n = N;
  product.is_a_transposed = IsATransposed;
  product.is_b_transposed = IsBTransposed;
  product.accumulates = accumulates;
  product.a_descriptor = a;
  product.b_descriptor = b;
  product.d = d;
  cuda_host::start_product(product);
}
template <int N, bool IsBTransposed, class T>
inline void start_product(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                          bool accumulates, T type) {
  static_assert(N % 16 == 0 && N >= 64 && N <= 256);
  cuda_host::Product product;
  product.dtype = dtype_of(type);
  product.n = N;
  product.is_a_in_registers = true;
  product.is_b_transposed = IsBTransposed;
  product.accumulates = accumulates;
  for (int i = 0; i < 4; ++i) product.a[i] = a[i];
  product.b_descriptor = b;
  product.d = d;
  cuda_host::start_product(product);
}

#endif

}  // namespace ptx
}  // namespace cpattn::cuda
