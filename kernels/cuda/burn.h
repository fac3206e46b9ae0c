// The peak rate of a GPU's multipliers, as a kernel: what the forward's rate is a share of.
#pragma once

#include "kernels/kernel_table.h"

namespace cpattn::cuda {

/// KernelTable::burn: mma of 16-bit elements out of registers, or fused multiply-adds of f32.
double burn(const BurnArgs& args);

namespace sm90 {

/// Likewise wgmma of 16-bit elements, both operands in shared memory. Hopper only.
double burn(const BurnArgs& args);

}  // namespace sm90
}  // namespace cpattn::cuda
