// The f32 backward on CUDA cores, with the bits of the CPU's f32 engine.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/block_gradient.h"
#include "kernels/cuda/backward_params.h"
#include "kernels/launch_tiles.h"

namespace cpattn::cuda::f32 {

/// None: what a task does not leave in a slot stays in registers.
std::size_t gradient_workspace_bytes(const KernelProblem& problem, const GradientLimits& limits);

/// What the launches of a step are, in their order.
std::vector<LaunchTiles> gradient_tiles(const AttentionShape& shape);

/// GradientKernels::step_image.
std::vector<std::byte> gradient_image(const BackwardArgs& args);

/// GradientKernels::backward: two launches, dk and dv, then dq. No float atomics: every element of
/// every slot has one owner, at the price of computing S and dP in both, 7 products instead of 5.
///
/// Dtypes   q, k, v: f32.
/// Order    that of GradientKernels::backward with kKeyTile keys and kQueryTile rows
///          (kernels/f32_engine.h), so all gradients have the bits of the CPU kernels.
/// Masked   a pair that is not visible contributes nothing, whatever the numbers are.
/// Stream   enqueued on args.stream.
void backward(const BackwardArgs& args);

/// The launches, each in a source of its own, since their kernels take nvcc long.
void launch_dkv(const BackwardArgs& args, const BackwardParams& params);
void launch_dq(const BackwardArgs& args, const BackwardParams& params);
LaunchTiles dkv_tiles(const AttentionShape& shape);
LaunchTiles dq_tiles(const AttentionShape& shape);

/// Sizes of the tiles that a thread block of either launch owns.
int key_tile_size(const AttentionShape& shape);
int row_tile_size(const AttentionShape& shape);

}  // namespace cpattn::cuda::f32
