// What the kernels of burn.h multiply, and what becomes of it.
#pragma once

#include "kernels/cuda/ptx.h"

namespace cpattn::cuda {

/// Numbers between -1 and 1 that look like any: a unit that multiplies zeros needs less power, and
/// its clock is then higher than it would be in earnest.
CP_DEVICE float burn_number(std::uint32_t index) {
  std::uint32_t bits = (index + 1) * 0x9e3779b9u;  // multiplicative hashing (Knuth, TAOCP 3, 6.4)
  bits ^= bits >> 15;
  bits *= 0x85ebca6bu;
  bits ^= bits >> 13;
  return static_cast<float>(static_cast<int>(bits >> 8) - (1 << 23)) * 0x1p-23f;
}

template <class T>
CP_DEVICE std::uint32_t burn_pair(std::uint32_t index) {
  return ptx::pack(burn_number(2 * index), burn_number(2 * index + 1), T{});
}

/// Writes a sum of all sums, so that no compiler leaves them out; `result`, one number for each
/// thread of the launch, may be null, which none of them can know.
template <int Count>
CP_DEVICE void keep_sums(const float (&sums)[Count], float* result) {
  if (result == nullptr) return;
  float sum = 0.0f;
  CP_UNROLL
  for (int i = 0; i < Count; ++i) sum += sums[i];
  result[std::size_t{blockIdx.x} * blockDim.x + threadIdx.x] = sum;
}

}  // namespace cpattn::cuda
