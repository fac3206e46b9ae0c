// wgmma on the host: the product of a 64 x 16 and a 16 x N matrix by a warpgroup.
//
// Landing::late: products are computed at the wait, from what shared memory holds then.
#pragma once

#include <cstdint>

#include "kernels/cuda/host/thread.h"
#include "src/base/dtype.h"

namespace cpattn::cuda_host {

/// One instruction, as one thread gives it.
struct Product {
  DType dtype = DType::bf16;
  unsigned n = 0;
  bool is_a_in_registers = false;
  bool is_a_transposed = false;  ///< [k][m] in shared memory ("MN-major"), not [m][k]
  bool is_b_transposed = false;  ///< [k][n], not [n][k]
  bool accumulates = false;      ///< d += A B, not d = A B
  std::uint32_t a[4] = {};       ///< rows of the thread's warp, as mma.m16n8k16 holds them
  std::uint64_t a_descriptor = 0;
  std::uint64_t b_descriptor = 0;
  /// n / 2 numbers: element e of thread t is row 16 (t / 32) + t % 32 / 4 + 8 (e / 2 % 2), column
  /// 8 (e / 4) + 2 (t % 4) + e % 2.
  float* d = nullptr;
  unsigned group = 0;
};

/// wgmma.fence. Expected before the first product of every group: a device asks for it where
/// registers of an operand were written since, which is not followed here.
void fence_products();
void start_product(const Product& product);
void commit_products();
/// All groups but the newest `num_newest` are complete, for the whole warpgroup.
void wait_products(unsigned num_newest);

/// setmaxnreg: of the whole warpgroup, a multiple of 8 from 24 to 256.
void set_max_registers(unsigned count);

struct DeviceThread;
/// Fails when the thread has products that it never waited for. For Block.
void check_products_done(const DeviceThread& thread);

}  // namespace cpattn::cuda_host
