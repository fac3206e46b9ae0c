// The kernel of pack_f32.h.
#pragma once

#include "kernels/cuda/f32_form.h"
#include "kernels/cuda/pieces.h"

namespace cpattn::cuda::f32 {

inline constexpr int kPackThreads = 256;
inline constexpr int kPackWarps = kPackThreads / 32;
inline constexpr int kPackChunks = 64;  ///< of one launch: 2 KiB of its 4 KiB of parameters

/// A chunk of a launch; its rows, heads outermost, are [first_row, first_row of the next).
struct ChunkToPack {
  std::int64_t row_begin = 0;
  std::int64_t num_keys = 0;
  std::int64_t first_row = 0;
  std::byte* packed = nullptr;
};

struct PackParams {
  PieceRows k, v;
  RowForm form;
  std::int64_t num_rows = 0;  ///< of all chunks and heads
  int num_chunks = 0;
  ChunkToPack chunks[kPackChunks];
};

/// A row of a tensor, `lane` doing every 32nd channel, and zeros behind it.
CP_DEVICE void pack_row(const PieceRows& tensor, std::int64_t row, std::int64_t head, int lane,
                        float* to) {
  const float* const from = static_cast<const float*>(tensor.elements) + row * tensor.row_stride +
                            head * tensor.head_stride;
  for (int d = lane; d < row_floats(tensor.dim); d += 32) to[d] = d < tensor.dim ? from[d] : 0.0f;
}

/// One warp for each key of each head.
__global__ void __launch_bounds__(kPackThreads)
    pack_kv_kernel(const __grid_constant__ PackParams params) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * kPackWarps + warp;
  if (row >= params.num_rows) return;
  int place = 0;
  while (place + 1 < params.num_chunks && params.chunks[place + 1].first_row <= row) ++place;
  const ChunkToPack& chunk = params.chunks[place];
  const std::int64_t head = (row - chunk.first_row) / chunk.num_keys;
  const std::int64_t key = (row - chunk.first_row) % chunk.num_keys;
  float* const k =
      reinterpret_cast<float*>(chunk.packed) + head * params.form.kv_floats(chunk.num_keys);
  float* const v = k + params.form.first_floats(chunk.num_keys);
  pack_row(params.k, chunk.row_begin + key, head, lane, k + params.form.first_floats(key));
  pack_row(params.v, chunk.row_begin + key, head, lane, v + params.form.second_floats(key));
}

}  // namespace cpattn::cuda::f32
