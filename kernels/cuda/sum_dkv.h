// What the owner of kv chunks does with whole dkv slots, and zeros: elementwise, for every dtype.
#pragma once

#include "kernels/block_gradient.h"

namespace cpattn::cuda {

/// GradientKernels::sum_dkv. Ops are parameters of launches, many to each, and a thread executes
/// all ops of its place in a chunk in order: one pass over the memory, and it can be captured.
void sum_dkv(const SumDkvArgs& args);

/// GradientKernels::zero_rows.
void zero_rows(const ZeroRowsArgs& args);

}  // namespace cpattn::cuda
