// The f32 forward on CUDA cores, with the bits of the CPU's f32 engine.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/block_attention.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::f32 {

std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits);

/// What the launch of a step is.
LaunchTiles launch_tiles(const AttentionShape& shape);

/// KernelTable::step_image.
std::vector<std::byte> step_image(const ForwardArgs& args);

/// KernelTable::forward: one launch.
///
/// Dtypes   q, k, v: f32.
/// Order    that of KernelTable::forward with kKeyTile keys (kernels/f32_engine.h), so m, l, o and
///          out have the bits of the CPU kernels; lse may differ in the last place, by the device's
///          logarithm.
/// Masked   a pair that is not visible contributes nothing, whatever the numbers are.
/// Stream   enqueued on args.stream.
void forward(const ForwardArgs& args);

}  // namespace cpattn::cuda::f32
