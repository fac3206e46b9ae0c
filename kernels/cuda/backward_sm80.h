// The portable 16-bit backward on tensor cores (mma.sync; sm_80 and later).
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/block_gradient.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::sm80_gradient {

/// None: what a task does not leave in a slot stays in registers.
std::size_t workspace_bytes(const KernelProblem& problem, const GradientLimits& limits);

/// What the launches of a step are, in their order.
std::vector<LaunchTiles> launch_tiles(const AttentionShape& shape);

/// GradientKernels::step_image.
std::vector<std::byte> step_image(const BackwardArgs& args);

/// GradientKernels::backward: two launches, dk, dv and dq (three where a head has more than 128
/// channels). No float atomics: every element of every slot has one owner, at the price of
/// computing S and dP in both: 7 products instead of 5 (8 in three launches).
///
/// Dtypes   q, k, v: f16 | bf16; products of 16-bit numbers added up in f32. p and ds are rounded
///          to that type before the last products, dout was when it was packed. In f16, a ds beyond
///          65504 becomes infinite.
/// Order    one accumulator per element of a leaf. dq leaf: keys ascending. dk, dv leaf: query
///          heads of the group ascending, rows ascending. Within 16 of them the order is the tensor
///          core's. Bits depend on the chunks, the mask and the sums only.
/// Masked   a pair that is not visible contributes nothing, whatever the numbers are. Where the 16
///          rows of a warp differ in what they see, an infinity that is seen becomes a NaN.
/// Stream   enqueued on args.stream.
void backward(const BackwardArgs& args);

}  // namespace cpattn::cuda::sm80_gradient
