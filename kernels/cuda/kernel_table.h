// The CUDA backend's kernels as KernelTables. All pointers are device addresses, and images of
// steps must be there before a call; every call enqueues on its stream and returns.
#pragma once

#include "kernels/kernel_table.h"

namespace cpattn::cuda {

/// "cuda/sm80": runs on sm_80 and later.
const KernelTable& sm80_kernels();

/// "cuda/sm90": runs on sm_90 devices alone. The forward of 16-bit elements is Hopper's own, and so
/// is their backward for head sizes up to 128; all else is that of sm80_kernels().
const KernelTable& sm90_kernels();

}  // namespace cpattn::cuda
