// Swizzle: how TMA and wgmma permute the 16-byte pieces of shared memory so that columns, too, are
// read without bank conflicts. A function of the address alone.
#pragma once

#include "kernels/cuda/compat.h"

namespace cpattn::cuda {

/// Width of the rows that are permuted.
enum class Swizzle : std::uint8_t { none, bytes32, bytes64, bytes128 };

CP_SHARED_BY_HOST constexpr unsigned width_bytes(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return 16;
    case Swizzle::bytes32:
      return 32;
    case Swizzle::bytes64:
      return 64;
    case Swizzle::bytes128:
      return 128;
  }
  return 0;
}

/// Tiles begin at multiples of this: eight rows.
CP_SHARED_BY_HOST constexpr unsigned pattern_bytes(Swizzle swizzle) {
  return 8 * width_bytes(swizzle);
}

/// Where the byte at `address` of the plain layout lies: the bits that choose a 16-byte piece of a
/// row (4 and up) are xored with as many from bit 7 up.
CP_SHARED_BY_HOST constexpr std::uint32_t swizzled(std::uint32_t address, Swizzle swizzle) {
  const std::uint32_t pieces = width_bytes(swizzle) / 16 - 1;
  return address ^ ((address >> 7 & pieces) << 4);
}

}  // namespace cpattn::cuda
