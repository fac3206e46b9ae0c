// The CPU backend's forward: checks, lays out the workspace, deals tiles to threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

std::size_t carried_slot_bytes(const KernelProblem& problem);
std::size_t workspace_bytes(const KernelProblem& problem, const TileKernels& kernels,
                            const StepLimits& limits);

/// KernelTable::forward for one instruction set. A tile of one head is one piece of work and is
/// computed by one thread from start to end, so the number of threads decides nothing but time.
void forward(const ForwardArgs& args, const TileKernels& kernels);

}  // namespace cpattn::cpu
