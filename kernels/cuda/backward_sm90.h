// The Hopper backward for 16-bit elements: TMA, mbarriers and wgmma, which exist on sm_90a alone.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/block_gradient.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::sm90_gradient {

/// Whether D and Dv are small enough for these kernels: registers hold the sums of 128 channels.
/// Wider heads are the portable backward's.
bool takes(const AttentionShape& shape);

/// What the launches of a step are, in their order.
std::vector<LaunchTiles> launch_tiles(const AttentionShape& shape);

/// GradientKernels::step_image, for tiles of 128 rows and keys.
std::vector<std::byte> step_image(const BackwardArgs& args);

/// GradientKernels::backward: two launches, dk, dv and dq, over the same tasks; no workspace. No
/// float atomics: every element of every slot has one owner, at the price of computing S and dP in
/// both, 7 products instead of 5.
///
/// Shapes   takes(shape).
/// Dtypes   q, k, v: f16 | bf16; products of 16-bit numbers added up in f32. p and ds are rounded
///          to that type before the last products, dout was when it was packed. In f16, a ds beyond
///          65504 becomes infinite.
/// Order    one accumulator per element of a leaf. dq leaf: keys ascending. dk, dv leaf: query
///          heads of the group ascending, rows ascending. Within 16 of them the order is the tensor
///          core's. Bits depend on the chunks, the mask and the sums only.
/// Masked   a pair that is not visible contributes nothing, whatever the numbers are. Where a tile
///          of 64 is not seen as a whole, an infinity that is seen becomes a NaN.
/// Stream   enqueued on args.stream.
void backward(const BackwardArgs& args);

}  // namespace cpattn::cuda::sm90_gradient
