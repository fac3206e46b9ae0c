// The Hopper forward for 16-bit elements: TMA, mbarriers and wgmma, which exist on sm_90a alone.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/block_attention.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::sm90 {

std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits);

/// What the launch of a step is.
LaunchTiles launch_tiles(const AttentionShape& shape);

/// KernelTable::step_image, for tiles of 128 rows.
std::vector<std::byte> step_image(const ForwardArgs& args);

/// KernelTable::forward: one launch.
///
/// Dtypes   q, k, v: f16 | bf16 (equal). The weights of a row are rounded to that type before they
///          meet v; their sum l is of the unrounded ones, so lse has f32's accuracy.
/// Order    keys ascending from the chunk's first, in steps of 128 (D and Dv up to 128) or 64: one
///          maximum and one rescaling for each. Products are added up as the tensor cores do it, 16
///          keys (or channels) at a time.
/// Masked   a pair that is not visible contributes nothing, whatever the numbers are.
/// Stream   enqueued on args.stream.
void forward(const ForwardArgs& args);

}  // namespace cpattn::cuda::sm90
