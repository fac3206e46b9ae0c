// The kernel behind report_portable: one warp, one result register after the other.
#pragma once

#include "kernels/cuda/arithmetic.h"

namespace cpattn::cuda {

/// In the order in which conformance_kernel stores them.
inline constexpr const char* kPortableResults[] = {"cp.async 0",
                                                   "cp.async 1 (some zeros)",
                                                   "cp.async 2 (some zeros)",
                                                   "cp.async 3 (some zeros)",
                                                   "ldmatrix.x4 0",
                                                   "ldmatrix.x4 1",
                                                   "ldmatrix.x4 2",
                                                   "ldmatrix.x4 3",
                                                   "ldmatrix.x4.trans 0",
                                                   "ldmatrix.x4.trans 1",
                                                   "ldmatrix.x4.trans 2",
                                                   "ldmatrix.x4.trans 3",
                                                   "ldmatrix.x2 0",
                                                   "ldmatrix.x2 1",
                                                   "ldmatrix.x2.trans 0",
                                                   "ldmatrix.x2.trans 1",
                                                   "mma bf16 0",
                                                   "mma bf16 1",
                                                   "mma bf16 2",
                                                   "mma bf16 3",
                                                   "mma f16 0",
                                                   "mma f16 1",
                                                   "mma f16 2",
                                                   "mma f16 3",
                                                   "pack bf16",
                                                   "pack f16",
                                                   "widen bf16",
                                                   "widen f16",
                                                   "ex2 of limits",
                                                   "2^x by polynomial",
                                                   "corrected quotient",
                                                   "shfl",
                                                   "shfl.up width 16",
                                                   "shfl.down width 8",
                                                   "shfl.xor",
                                                   "ballot",
                                                   "thread"};
inline constexpr int kNumPortableResults = sizeof(kPortableResults) / sizeof(kPortableResults[0]);
inline constexpr std::size_t kPortableSharedBytes = 2048;

inline constexpr unsigned kNumSourceWords = 512;  // then the 32 numbers to round

/// `source`: kNumSourceWords + 32. `out`: kNumPortableResults times 32.
__global__ void __launch_bounds__(32)
    conformance_kernel(const std::uint32_t* source, std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  const unsigned lane = threadIdx.x;
  const auto* words = reinterpret_cast<const std::uint32_t*>(memory);
  const ptx::SharedAddress base = ptx::shared_address(memory);
  const auto store = [&](std::uint32_t word) {
    out[lane] = word;
    out += 32;
  };

  for (unsigned i = 0; i < 4; ++i) {
    ptx::copy_async16(base + (i * 32 + lane) * 16, source + (i * 32 + lane) * 4,
                      i == 0 || (lane + i) % 5 != 0);
  }
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncwarp();
  for (unsigned i = 0; i < 4; ++i) store(words[(i * 32 + lane) * 4 + lane % 4]);

  std::uint32_t four[4], two[2];
  const ptx::SharedAddress row = base + lane * 48 % 1024;
  ptx::load_matrices(four, row);
  for (const std::uint32_t word : four) store(word);
  ptx::load_transposed(four, row);
  for (const std::uint32_t word : four) store(word);
  ptx::load_matrices(two, row);
  for (const std::uint32_t word : two) store(word);
  ptx::load_transposed(two, row);
  for (const std::uint32_t word : two) store(word);

  // Small integers: exact in 16 bits, exact sums.
  const auto number = [&](unsigned factor, unsigned add, unsigned modulus) {
    return static_cast<float>((lane * factor + add) % modulus) - static_cast<float>(modulus / 2);
  };
  const auto multiply = [&](auto type) {
    std::uint32_t a[4], b[2];
    for (unsigned i = 0; i < 4; ++i) {
      a[i] = ptx::pack(number(7, 3 * i, 17), number(5, i, 13), type);
    }
    for (unsigned i = 0; i < 2; ++i) {
      b[i] = ptx::pack(number(3, 11 * i, 19), number(1, i, 7), type);
    }
    float d[4] = {static_cast<float>(lane), -1.0f, 2.0f, 3.0f};
    ptx::multiply(d, a, b[0], b[1], type);
    for (const float x : d) store(__float_as_uint(x));
  };
  multiply(bf16{});
  multiply(f16{});

  const float first = __uint_as_float(source[kNumSourceWords + lane]);
  const float second = -__uint_as_float(source[kNumSourceWords + 31 - lane]);
  store(ptx::pack(first, second, bf16{}));
  store(ptx::pack(first, second, f16{}));
  store(__float_as_uint(ptx::widen(bf16{static_cast<std::uint16_t>(lane * 2047u)})));
  // Up to infinity; which NaN a wider NaN becomes is the device's affair.
  store(__float_as_uint(ptx::widen(f16{static_cast<std::uint16_t>(lane * 1024u)})));

  const float limit = lane % 2 == 0 ? 0.0f : INFINITY;
  store(__float_as_uint(ptx::exp2_approximate(lane % 4 < 2 ? limit : -limit)));
  store(__float_as_uint(exp2_nonpositive(-0.37f * static_cast<float>(lane * lane))));
  const float l = 1.0f + 0.1f * static_cast<float>(lane);
  store(__float_as_uint(divide(0.3f * static_cast<float>(lane) - 4.0f, l, 1.0f / l)));

  const int value = static_cast<int>(lane) * 3;
  store(static_cast<std::uint32_t>(__shfl_sync(0xffffffffu, value, 9, 8)));
  store(static_cast<std::uint32_t>(__shfl_up_sync(0xffffffffu, value, 3u, 16)));
  store(static_cast<std::uint32_t>(__shfl_down_sync(0xffffffffu, value, 2u, 8)));
  store(static_cast<std::uint32_t>(__shfl_xor_sync(0xffffffffu, value, 5)));
  store(__ballot_sync(0xffffffffu, (lane * 7 & 4) != 0));
  store(ptx::thread());
}

}  // namespace cpattn::cuda
