// The kernel of pack_queries_f32.h.
#pragma once

#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/f32_form.h"

namespace cpattn::cuda::f32 {

inline constexpr int kPackQueryChunks = 64;  ///< of one launch: 2 KiB of its 4 KiB of parameters

/// A chunk of a launch; its tiles of kDeltaRows rows are [first_tile, first_tile of the next), head
/// by head.
struct QueriesToPack {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t first_tile = 0;
  std::byte* packed = nullptr;
};

struct PackQueriesParams {
  TensorRows q;
  DeltaArgs delta;  ///< of the shard: out, dout, lse, dlse
  RowForm form;
  std::int64_t num_heads = 0;
  std::int64_t num_tiles = 0;  ///< of all chunks
  int num_chunks = 0;
  QueriesToPack chunks[kPackQueryChunks];
};

CP_SHARED_BY_HOST constexpr std::int64_t query_tiles(std::int64_t num_rows) {
  return (num_rows + kDeltaRows - 1) / kDeltaRows;
}

/// A row of a tensor, `lane` doing every 32nd channel, and zeros behind it; all zeros where it is
/// not used.
CP_DEVICE void pack_query_row(const TensorRows& tensor, std::int64_t row, std::int64_t head,
                              int dim, bool is_used, float* to) {
  const std::int64_t from = row * tensor.row_stride + head * tensor.head_stride;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < row_floats(dim); d += 32) {
    to[d] = is_used && d < dim ? load_element(tensor.data, tensor.dtype, from + d) : 0.0f;
  }
}

/// One warp for each tile. Six blocks fill a multiprocessor's shared memory, so registers for more
/// of them would be spilled for nothing.
__global__ void __launch_bounds__(32 * kDeltaWarps, 6)
    pack_queries_kernel(const __grid_constant__ PackQueriesParams params) {
  CP_DYNAMIC_SMEM(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t tile = std::int64_t{blockIdx.x} * kDeltaWarps + warp;
  if (tile >= params.num_tiles) return;
  int place = 0;
  while (place + 1 < params.num_chunks && params.chunks[place + 1].first_tile <= tile) ++place;
  const QueriesToPack& chunk = params.chunks[place];
  const std::int64_t tiles = query_tiles(chunk.num_rows), index = tile - chunk.first_tile;
  const std::int64_t head = index / tiles, first = index % tiles * kDeltaRows;
  const std::int64_t end_row = chunk.row_begin + chunk.num_rows;
  const RowForm& form = params.form;
  const QueryParts parts = query_parts(form, params.num_heads, chunk.num_rows);
  float* const packed = reinterpret_cast<float*>(chunk.packed);
  const ScalarRows& lse = params.delta.lse;
  const auto lse_of = [&](std::int64_t row) {
    return row < end_row ? lse.data[row * lse.row_stride + head * lse.head_stride] : -INFINITY;
  };
  const std::int64_t row = chunk.row_begin + first;
  const std::int64_t to = head * chunk.num_rows + first;
  for (int r = 0; r < kDeltaRows && row + r < end_row; ++r) {
    const bool is_used = lse_of(row + r) != -INFINITY;
    pack_query_row(params.q, row + r, head, form.dim, is_used, packed + form.first_floats(to + r));
    pack_query_row(params.delta.dout, row + r, head, form.value_dim, is_used,
                   packed + parts.dout + form.second_floats(to + r));
  }
  const float delta = lane_delta(params.delta, head, row, end_row,
                                 reinterpret_cast<float*>(memory) + warp * kDeltaWarpFloats);
  if (row + lane >= end_row) return;
  packed[parts.lse + to + lane] =
      static_cast<float>(static_cast<double>(lse_of(row + lane)) * kLog2e);
  packed[parts.delta + to + lane] = delta;
}

}  // namespace cpattn::cuda::f32
