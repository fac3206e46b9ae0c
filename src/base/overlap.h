// Whether two strided views share a byte, decided exactly: views that interleave in one buffer (q,
// k, v of a fused [T, 3, H, D]) do not, whatever their bounding ranges say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "src/base/tensor_view.h"

namespace cpattn {

/// The bytes of a view: runs of row_bytes at address + i * strides[0] + j * strides[1] (bytes).
struct RowSet {
  std::intptr_t address = 0;
  std::array<std::int64_t, 2> counts{};
  std::array<std::int64_t, 2> strides{};
  std::int64_t row_bytes = 0;
};

/// Needs a contiguous last dimension.
RowSet rows_of(const AnyConstTensor& tensor);

template <class T>
RowSet rows_of(const TensorView<T, 2>& view) {
  const auto size = static_cast<std::int64_t>(sizeof(T));
  return {reinterpret_cast<std::intptr_t>(view.data),
          view.shape,
          {view.strides[0] * size, view.strides[1] * size},
          view.data == nullptr ? 0 : size};
}

/// Some byte belongs to both. Allocates nothing. Cost: one comparison when the address ranges are
/// apart; O(rows) at most for views that interleave with equal strides, as those of a fused buffer
/// do, and O(tokens * heads) for others.
bool overlap(const RowSet& a, const RowSet& b);

/// Two different rows of one view share a byte: a stride of 0, or one too short.
bool overlaps_itself(const RowSet& rows);

}  // namespace cpattn
