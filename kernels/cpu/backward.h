// The CPU backend's backward: checks, lays out the workspace, deals (task, kv head) units to
// threads.
#pragma once

#include <cstddef>

#include "kernels/block_gradient.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

std::size_t dq_slot_bytes(const KernelProblem& problem);
std::size_t gradient_workspace_bytes(const KernelProblem& problem, const TileKernels& kernels,
                                     const GradientLimits& limits);

/// GradientKernels::backward for one instruction set. What is added up in order is added up by one
/// thread after the other, so the number of threads decides nothing but time.
void backward(const BackwardArgs& args, const TileKernels& kernels);

}  // namespace cpattn::cpu
