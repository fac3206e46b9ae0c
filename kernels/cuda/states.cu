#include "kernels/cuda/states.cuh"

#include "kernels/cuda/launch.h"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

/// The smallest power of two of lanes that covers `num_pieces`, at most a warp.
int lanes_for(std::int64_t num_pieces) {
  int lanes = 1;
  while (lanes < 32 && lanes < num_pieces) lanes *= 2;
  return lanes;
}

dim3 blocks_for(const StateShape& shape, int lanes_per_state) {
  const std::int64_t states_per_block = kStateThreads / lanes_per_state;
  return dim3(narrow<unsigned>(ceil_div(shape.num_states(), states_per_block)));
}

}  // namespace

std::size_t state_slot_bytes(const StateShape& shape) {
  const std::int64_t floats = shape.num_scalars() + shape.num_states() * shape.padded_dim();
  return round_up(static_cast<std::size_t>(floats) * sizeof(float), std::size_t{256});
}

void merge_states(const StateShape& shape, const StateSlot& left, const StateSlot& right,
                  const StateSlot& dst, cudaStream_t stream) {
  if (shape.num_states() == 0) return;
  const int lanes = lanes_for(shape.padded_dim() / 4);
  launch(merge_kernel, blocks_for(shape, lanes), dim3(kStateThreads), 0, stream, shape, left, right,
         dst, lanes);
}

void finalize_states(const StateShape& shape, const StateSlot& state, const ResultRows& result,
                     cudaStream_t stream) {
  if (shape.num_states() == 0) return;
  const int lanes = lanes_for(shape.value_dim);
  launch(finalize_kernel<false>, blocks_for(shape, lanes), dim3(kStateThreads), 0, stream, shape,
         state, result, lanes);
}

void finalize_empty(const StateShape& shape, const ResultRows& result, cudaStream_t stream) {
  if (shape.num_states() == 0) return;
  const int lanes = lanes_for(shape.value_dim);
  launch(finalize_kernel<true>, blocks_for(shape, lanes), dim3(kStateThreads), 0, stream, shape,
         StateSlot{}, result, lanes);
}

void record_head_maxima(const StateShape& shape, const StateSlot& state, float* maxima,
                        cudaStream_t stream) {
  if (shape.num_states() == 0) return;
  launch(head_maxima_kernel, dim3(narrow<unsigned>(shape.num_heads)), dim3(kStateThreads),
         kStateThreads / 32 * sizeof(float), stream, shape, state.m, maxima);
}

}  // namespace cpattn::cuda
