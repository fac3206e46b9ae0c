// Slots of the backward: f32 sums of whole chunks, unscaled, which every dtype shares.
//
//   dkv slot    for each kv head: dk [keys][D], dv [keys][Dv]; it travels between ranks
//   dq slot     for each query head: [rows of the longest chunk][D]
//
// Rows are filled up to whole 16 bytes, so four channels are read at once; the surplus holds sums
// of zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"
#include "kernels/cuda/compat.h"

namespace cpattn::cuda {

struct GradientSlotForm {
  int head_dim = 1;
  int value_dim = 1;

  CP_SHARED_BY_HOST static constexpr int row_floats(int dim) { return (dim + 3) / 4 * 4; }
  CP_SHARED_BY_HOST constexpr int dk_floats() const { return row_floats(head_dim); }
  CP_SHARED_BY_HOST constexpr int dv_floats() const { return row_floats(value_dim); }
  /// Of one kv head.
  CP_SHARED_BY_HOST constexpr std::int64_t head_floats(std::int64_t num_keys) const {
    return num_keys * (dk_floats() + dv_floats());
  }
};

/// Of slots, and their sizes are multiples of it.
inline constexpr std::size_t kSlotAlignment = 64;

GradientSlotForm gradient_slot_form(const AttentionShape& shape);

/// GradientKernels::dq_slot_bytes and dkv_slot_bytes.
std::size_t dq_slot_bytes(const KernelProblem& problem);
std::size_t dkv_slot_bytes(const KernelProblem& problem, std::int64_t num_keys);

}  // namespace cpattn::cuda
