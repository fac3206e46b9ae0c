#include "kernels/cpu/copy_rows.h"

#include <cstring>

namespace cpattn::cpu {

void copy_rows(const RowCopy& copy) {
  if (copy.row_bytes == 0) return;
  for (std::int64_t i = 0; i < copy.num_ranges; ++i) {
    const RowRange& range = copy.ranges[i];
    const std::int64_t end = i + 1 < copy.num_ranges ? copy.ranges[i + 1].first_row : copy.num_rows;
    for (std::int64_t row = 0; row < end - range.first_row; ++row) {
      std::memcpy(copy.to + (range.to_row + row) * copy.to_stride_bytes,
                  copy.from + (range.from_row + row) * copy.from_stride_bytes,
                  static_cast<std::size_t>(copy.row_bytes));
    }
  }
}

}  // namespace cpattn::cpu
