// States (m, l, o) in device memory, and what is done with whole slots of them: merge, finalize,
// statistics. The algebra is that of kernels/lse.h; all bits but those of lse are the CPU kernels'.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/compat.h"
#include "src/base/dtype.h"

namespace cpattn::cuda {

/// One slot: the states of all heads and rows of a q chunk.
struct StateShape {
  std::int64_t num_heads = 0;
  std::int64_t num_rows = 0;
  std::int64_t value_dim = 0;

  CP_SHARED_BY_HOST std::int64_t num_states() const { return num_heads * num_rows; }
  /// Channels of o, whole 16 bytes; the surplus holds anything.
  CP_SHARED_BY_HOST std::int64_t padded_dim() const { return (value_dim + 3) / 4 * 4; }
  /// Floats of all m and l, whole 16 bytes.
  CP_SHARED_BY_HOST std::int64_t num_scalars() const { return (2 * num_states() + 3) / 4 * 4; }
};

/// State i = head * num_rows + row: m[i], l[i], o[i * padded_dim + d].
struct StateSlot {
  float* m = nullptr;
  float* l = nullptr;
  float* o = nullptr;  ///< 16-byte aligned
};

/// Bytes of a slot, a multiple of 256, and its parts within memory of that size (16-byte aligned).
std::size_t state_slot_bytes(const StateShape& shape);
CP_SHARED_BY_HOST inline StateSlot state_slot_at(const StateShape& shape, std::byte* memory) {
  auto* floats = reinterpret_cast<float*>(memory);
  return {floats, floats + shape.num_states(), floats + shape.num_scalars()};
}

/// dst = merge(left, right); dst may be left or right.
void merge_states(const StateShape& shape, const StateSlot& left, const StateSlot& right,
                  const StateSlot& dst, cudaStream_t stream);

/// Where results go; strides in elements.
struct ResultRows {
  void* out = nullptr;  ///< row 0, head 0; channels contiguous
  DType out_dtype = DType::f32;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
};

/// out = o / l, lse = m ln 2 + ln l. An empty state gives 0 and -inf; zeros are +0. lse is
/// evaluated in double by the device's logarithm: it may differ from the CPU's in the last place.
void finalize_states(const StateShape& shape, const StateSlot& state, const ResultRows& result,
                     cudaStream_t stream);

/// out = 0, lse = -inf: rows that see no key.
void finalize_empty(const StateShape& shape, const ResultRows& result, cudaStream_t stream);

/// maxima[h] = max(maxima[h], largest logit of head h): m * ln 2 over the rows of the slot, which
/// must hold final states. Starts from -inf ("nothing observed"); a NaN stays. Order-free: a
/// maximum has no rounding.
void record_head_maxima(const StateShape& shape, const StateSlot& state, float* maxima,
                        cudaStream_t stream);

}  // namespace cpattn::cuda
