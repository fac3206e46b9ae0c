// Rows copied by ranges: shards gathered from a whole tensor and scattered into one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/device/device.h"

namespace cpattn {

/// Rows [from_row, from_row + n) go to [to_row, to_row + n); n is the next range's first_row less
/// this one's.
struct RowRange {
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;
  std::int64_t first_row = 0;  ///< how many rows the ranges before it have
};

/// Gather, scatter or both; `from` and `to` do not overlap. Any alignment; 16 bytes are fastest.
struct RowCopy {
  const std::byte* from = nullptr;
  std::int64_t from_stride_bytes = 0;
  std::byte* to = nullptr;
  std::int64_t to_stride_bytes = 0;
  std::int64_t row_bytes = 0;
  const RowRange* ranges = nullptr;  ///< in the device's memory, first_row ascending from 0
  std::int64_t num_ranges = 0;
  std::int64_t num_rows = 0;  ///< of all ranges
  Stream stream = {};
};

}  // namespace cpattn
