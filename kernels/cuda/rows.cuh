// Kernels of rows.h.
#pragma once

#include "kernels/cuda/delta.cuh"

namespace cpattn::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / 32;

/// Numbers that any bytes may be looked at as.
struct CP_MAY_ALIAS Bytes2 {
  std::uint16_t value;
};
struct CP_MAY_ALIAS Bytes4 {
  std::uint32_t value;
};

/// One warp for each row, `Unit` by `Unit`.
template <class Unit>
__global__ void __launch_bounds__(kRowThreads) copy_kernel(const RowCopy copy) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowWarps + warp;
  if (row >= copy.num_rows) return;
  std::int64_t low = 0, high = copy.num_ranges;  // the last range that begins at or before the row
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (copy.ranges[middle].first_row <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const RowRange range = copy.ranges[low];
  const std::int64_t within = row - range.first_row;
  const auto* from =
      reinterpret_cast<const Unit*>(copy.from + (range.from_row + within) * copy.from_stride_bytes);
  auto* to = reinterpret_cast<Unit*>(copy.to + (range.to_row + within) * copy.to_stride_bytes);
  const std::int64_t units = copy.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = lane; i < units; i += 32) to[i] = from[i];
}

/// One warp for 32 rows of a head.
__global__ void __launch_bounds__(32 * kDeltaWarps) delta_kernel(const DeltaArgs args) {
  CP_DYNAMIC_SMEM(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t head = blockIdx.y;
  const std::int64_t first_row = (std::int64_t{blockIdx.x} * kDeltaWarps + warp) * kDeltaRows;
  const float delta = lane_delta(args, head, first_row, args.num_rows,
                                 reinterpret_cast<float*>(memory) + warp * kDeltaWarpFloats);
  if (first_row + lane < args.num_rows) args.delta[head * args.num_rows + first_row + lane] = delta;
}

}  // namespace cpattn::cuda
