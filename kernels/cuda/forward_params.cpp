#include "kernels/cuda/forward_params.h"

#include <algorithm>
#include <cmath>

#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

/// Kernels count them in 32 bits.
int num_items(const ForwardArgs& args, int tile_rows) {
  std::int64_t tiles = 0;
  for (const QueryProgram& program : args.programs)
    tiles += ceil_div<std::int64_t>(program.num_rows, tile_rows);
  return narrow<int>(tiles * args.problem.shape.num_heads);
}

StateShape scratch_shape(const KernelProblem& problem, int tile_rows) {
  return {1, tile_rows, problem.shape.value_dim};
}

}  // namespace

ScoreScale score_scale(double softmax_scale) {
  const double scale = softmax_scale * kLog2e;
  const auto magnitude = static_cast<float>(std::abs(scale));
  if (magnitude == 0.0f) return {.is_zero = true};
  return {.multiplier = magnitude, .is_negative = scale < 0};
}

StateShape carried_shape(const KernelProblem& problem) {
  return {problem.shape.num_heads, problem.max_chunk_rows, problem.shape.value_dim};
}

std::size_t forward_workspace_bytes(const KernelProblem& problem, const StepLimits& limits,
                                    int tile_rows) {
  return static_cast<std::size_t>(problem.num_threads) *
         static_cast<std::size_t>(limits.scratch_slots) *
         state_slot_bytes(scratch_shape(problem, tile_rows));
}

unsigned forward_blocks(const ForwardArgs& args, int tile_rows) {
  return narrow<unsigned>(std::min(num_items(args, tile_rows), args.problem.num_threads));
}

ForwardParams forward_params(const ForwardArgs& args, int tile_rows) {
  const AttentionShape& shape = args.problem.shape;
  const StateShape carried = carried_shape(args.problem);
  const StateShape scratch = scratch_shape(args.problem, tile_rows);
  return {.image = reinterpret_cast<const StepImage*>(args.image),
          .q = piece_rows(args.q),
          .scale = score_scale(shape.softmax_scale),
          .num_heads = narrow<int>(shape.num_heads),
          .group_size = narrow<int>(shape.group_size()),
          .value_dim = narrow<int>(shape.value_dim),
          .form = {num_panels(shape.head_dim), num_panels(shape.value_dim)},
          .carried_shape = carried,
          .carried = args.carried,
          .carried_slot_bytes = static_cast<std::int64_t>(state_slot_bytes(carried)),
          .scratch_shape = scratch,
          .scratch = args.workspace,
          .scratch_slot_bytes = static_cast<std::int64_t>(state_slot_bytes(scratch)),
          .num_scratch_slots = args.limits.scratch_slots,
          .result = {args.out.data, args.out.dtype, args.out.strides[0], args.out.strides[1],
                     args.lse.data, args.lse.strides[0], args.lse.strides[1]},
          .head_maxima = args.head_maxima};
}

}  // namespace cpattn::cuda
