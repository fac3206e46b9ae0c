// Delta of the backward, as kernels compute it: 32 rows by a warp.
#pragma once

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/rows.h"

namespace cpattn::cuda {

inline constexpr int kDeltaRows = 32;
inline constexpr int kDeltaStride = 33;  // a column of a tile lies in 32 different banks
inline constexpr int kDeltaWarps = 4;
inline constexpr int kDeltaWarpFloats = 2 * kDeltaRows * kDeltaStride;
inline constexpr std::size_t kDeltaSharedBytes = sizeof(float) * kDeltaWarps * kDeltaWarpFloats;

/// Delta of row first_row + lane of a head, 0 from end_row on. For a whole warp, which has
/// kDeltaWarpFloats of `memory`. A row's sum is one chain of fma, so a lane does a row, and tiles
/// of 32 channels go through shared memory to be read from global memory side by side.
CP_DEVICE float lane_delta(const DeltaArgs& args, std::int64_t head, std::int64_t first_row,
                           std::int64_t end_row, float* memory) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const out = memory;
  float* const dout = out + kDeltaRows * kDeltaStride;
  const std::int64_t row = first_row + lane;
  bool is_used = false;
  if (row < end_row) {
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
  if (is_used && args.dlse.data != nullptr) {
    sum -= args.dlse.data[row * args.dlse.row_stride + head * args.dlse.head_stride];
  }
  return sum;
}

}  // namespace cpattn::cuda
