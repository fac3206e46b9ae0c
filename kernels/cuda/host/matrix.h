// ldmatrix and mma.sync on the host.
#pragma once

#include "kernels/cuda/host/async_copies.h"
#include "kernels/cuda/host/warp.h"
#include "src/base/dtype.h"

namespace cpattn::cuda_host {

/// Distributes 8x8 matrices of 16-bit elements. Lane 8 i + r brings row r of matrix i and its
/// address; lane l receives from every matrix elements 2 (l % 4) and the next of row l / 4, or,
/// transposed, of column l / 4. `count` matrices: 2 or 4.
void distribute_matrices(const Bytes16& row, SharedAddress address, unsigned count,
                         bool is_transposed, std::uint32_t* registers);

inline void load_matrices(SharedAddress address, unsigned count, bool is_transposed,
                          std::uint32_t* registers) {
  Bytes16 row{};
  // Here, so that the sanitizers see the lane itself read its row.
  if (current_thread->lane < 8 * count) {
    row = *reinterpret_cast<const Bytes16*>(shared_place(address, 16, 16));
  }
  distribute_matrices(row, address, count, is_transposed, registers);
}

/// d += A B for A[16][16], B[16][8], f32 sums. With g = lane / 4 and t = lane % 4 a lane holds
///   a: (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8), each with its right neighbour
///   b: (2t, g) (2t+8, g), each with the one below
///   d: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
/// Order: from d, k ascending; products are exact, so each step is one rounding. The tensor core
/// adds in an order and with roundings of its own.
void multiply_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b, bf16);
void multiply_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b, f16);

}  // namespace cpattn::cuda_host
