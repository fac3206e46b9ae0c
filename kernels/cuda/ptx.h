// Every PTX instruction of the portable path (sm_80 and later), one wrapper each, in two halves:
// inline assembly for the device, the host layer elsewhere. Nothing outside of this file and
// ptx_sm90.h writes assembly.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, mma.m16n8k16):
//   a[4]  pairs at (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8) of A[16][16]
//   b[2]  pairs at (2t, g) (2t+8, g) of B[16][8], the second of a pair one row down
//   d[4]  (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) of D[16][8]
// A pair holds its first element in the low half.
#pragma once

#include "kernels/cuda/compat.h"
#include "src/base/dtype.h"

#if !defined(__CUDACC__)
#include "kernels/cuda/host/async_copies.h"
#include "kernels/cuda/host/matrix.h"
#include "kernels/cuda/host/numbers.h"
#endif

namespace cpattn::cuda::ptx {

/// 32 bits in both worlds, so that address arithmetic is the same code.
using SharedAddress = std::uint32_t;

#if defined(__CUDACC__)

CP_DEVICE SharedAddress shared_address(const void* place) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(place));
}

/// threadIdx.x, asked for anew each time: what follows from it is not kept in registers over
/// everything that happens in between.
CP_DEVICE unsigned thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// 16 bytes from global to shared memory, past the registers; zeros where !is_valid, and then
/// nothing is read. Both addresses are multiples of 16.
CP_DEVICE void copy_async16(SharedAddress to, const void* from, bool is_valid) {
  const int bytes = is_valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// Closes the group of the thread's copies started since the last one.
CP_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// All groups of the thread but the newest NumNewest have landed, for this thread to see.
template <int NumNewest>
CP_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NumNewest) : "memory");
}

/// Four 8x8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i.
/// registers[i] = the pair at (lane / 4, 2 (lane % 4)) of matrix i.
CP_DEVICE void load_matrices(std::uint32_t (&registers)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}
CP_DEVICE void load_matrices(std::uint32_t (&registers)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(row)
               : "memory");
}

/// Likewise of the transposed matrices.
CP_DEVICE void load_transposed(std::uint32_t (&registers)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}
CP_DEVICE void load_transposed(std::uint32_t (&registers)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(row)
               : "memory");
}

/// d += a b.
CP_DEVICE void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                        std::uint32_t b1, bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
CP_DEVICE void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                        std::uint32_t b1, f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Rounded to nearest even.
CP_DEVICE std::uint32_t pack(float first, float second, bf16) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
CP_DEVICE std::uint32_t pack(float first, float second, f16) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

/// Exact.
CP_DEVICE float widen(bf16 value) { return __uint_as_float(std::uint32_t{value.bits} << 16); }
CP_DEVICE float widen(f16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

/// 2^x with a relative error of about 2^-22; denormal results are 0.
CP_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Barriers 1 to 15 of the block for `num_threads` of it, a multiple of 32.
CP_DEVICE void named_barrier_sync(unsigned id, unsigned num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
/// Counts for it without waiting.
CP_DEVICE void named_barrier_arrive(unsigned id, unsigned num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

#else

inline SharedAddress shared_address(const void* place) { return cuda_host::shared_address(place); }

inline void copy_async16(SharedAddress to, const void* from, bool is_valid) {
  cuda_host::copy_async16(to, from, is_valid);
}
inline void commit_copies() { cuda_host::commit_copies(); }
template <int NumNewest>
inline void wait_copies() {
  cuda_host::wait_copies(NumNewest);
}

inline unsigned thread() { return cuda_host::current_thread->thread_index.x; }

template <std::size_t Count>
inline void load_matrices(std::uint32_t (&registers)[Count], SharedAddress row) {
  static_assert(Count == 2 || Count == 4);
  cuda_host::load_matrices(row, Count, false, registers);
}
template <std::size_t Count>
inline void load_transposed(std::uint32_t (&registers)[Count], SharedAddress row) {
  static_assert(Count == 2 || Count == 4);
  cuda_host::load_matrices(row, Count, true, registers);
}

template <class T>
inline void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                     T type) {
  const std::uint32_t b[2] = {b0, b1};
  cuda_host::multiply_16x8x16(d, a, b, type);
}

template <class T>
inline std::uint32_t pack(float first, float second, T type) {
  return cuda_host::rounded_bits(first, type) | std::uint32_t{cuda_host::rounded_bits(second, type)}
                                                    << 16;
}

template <class T>
inline float widen(T value) {
  return to_float(value);
}

/// Correctly rounded, unlike the device's.
inline float exp2_approximate(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline void named_barrier_sync(unsigned id, unsigned num_threads) {
  cuda_host::barrier_sync(id, num_threads, "named barrier");
}
inline void named_barrier_arrive(unsigned id, unsigned num_threads) {
  cuda_host::barrier_arrive(id, num_threads);
}

#endif

}  // namespace cpattn::cuda::ptx
