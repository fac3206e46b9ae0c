// Kernels of rows.h.
#pragma once

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/rows.h"

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

inline constexpr int kDeltaRows = 32;
inline constexpr int kDeltaStride = 33;  // a column of a tile lies in 32 different banks
inline constexpr int kDeltaWarps = 4;
inline constexpr std::size_t kDeltaSharedBytes =
    sizeof(float) * kDeltaWarps * 2 * kDeltaRows * kDeltaStride;

/// One warp for 32 rows of a head. A row's sum is one chain of fma, so a lane does a row, and tiles
/// of 32 channels go through shared memory to be read from global memory side by side.
__global__ void __launch_bounds__(32 * kDeltaWarps) delta_kernel(const DeltaArgs args) {
  CP_DYNAMIC_SMEM(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float* out = reinterpret_cast<float*>(memory) + warp * 2 * kDeltaRows * kDeltaStride;
  float* dout = out + kDeltaRows * kDeltaStride;
  const std::int64_t head = blockIdx.y;
  const std::int64_t first_row = (std::int64_t{blockIdx.x} * kDeltaWarps + warp) * kDeltaRows;
  const std::int64_t row = first_row + lane;
  bool is_used = false;
  if (row < args.num_rows) {
    is_used = args.lse.data[row * args.lse.row_stride + head * args.lse.head_stride] != -INFINITY;
  }
  const unsigned used = __ballot_sync(0xffffffffu, is_used);
  float sum = 0.0f;
  for (std::int64_t d = 0; d < args.value_dim; d += 32) {
    CP_UNROLL_BY(2)  // more of them, and the code for sm_80 spills
    for (int r = 0; r < kDeltaRows; ++r) {
      if ((used >> r & 1u) == 0 || d + lane >= args.value_dim) continue;
      const std::int64_t it = first_row + r;
      out[r * kDeltaStride + lane] =
          load_element(args.out.data, args.out.dtype,
                       it * args.out.row_stride + head * args.out.head_stride + d + lane);
      dout[r * kDeltaStride + lane] =
          load_element(args.dout.data, args.dout.dtype,
                       it * args.dout.row_stride + head * args.dout.head_stride + d + lane);
    }
    __syncwarp();
    const int channels = args.value_dim - d < 32 ? static_cast<int>(args.value_dim - d) : 32;
    for (int i = 0; is_used && i < channels; ++i) {
      sum = fmaf(dout[lane * kDeltaStride + i], out[lane * kDeltaStride + i], sum);
    }
    __syncwarp();  // before the tiles are overwritten
  }
  if (row >= args.num_rows) return;
  if (is_used && args.dlse.data != nullptr) {
    sum -= args.dlse.data[row * args.dlse.row_stride + head * args.dlse.head_stride];
  }
  args.delta[head * args.num_rows + row] = sum;
}

}  // namespace cpattn::cuda
