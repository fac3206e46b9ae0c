// The kernel of pack_queries.h.
#pragma once

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/pieces.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tile_form.h"

namespace cpattn::cuda {

inline constexpr int kPackQueryThreads = 256;
inline constexpr int kPackQueryChunks = 64;  ///< of one launch: 2 KiB of its 4 KiB of parameters
inline constexpr int kPackStride = kPanelColumns + 1;  // a column lies in 32 different banks
/// dout and out of one panel, and lse, in f32.
inline constexpr std::size_t kPackQuerySharedBytes =
    sizeof(float) * (2 * kTileRows * kPackStride + kTileRows);

/// A chunk of a launch; its tiles are [first_tile, first_tile of the next), head by head.
struct QueriesToPack {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t first_tile = 0;
  std::byte* packed = nullptr;
};

struct PackQueriesParams {
  PieceRows q;
  TensorRows out, dout;
  ScalarRows lse, dlse;
  QueryForm form;
  int value_dim = 0;
  int num_chunks = 0;
  QueriesToPack chunks[kPackQueryChunks];
};

struct CP_MAY_ALIAS PackedPair {
  std::uint32_t bits;
};

/// One tile of one head while it is packed; `row` is the tile's first in the caller's tensors.
struct QueryTile {
  std::int64_t row = 0;
  std::int64_t head = 0;
  int num_rows = 0;
  std::byte* packed = nullptr;
};

CP_DEVICE QueryTile query_tile(const PackQueriesParams& params) {
  int place = 0;
  while (place + 1 < params.num_chunks && params.chunks[place + 1].first_tile <= blockIdx.x) {
    ++place;
  }
  const QueriesToPack& chunk = params.chunks[place];
  const std::int64_t index = blockIdx.x - chunk.first_tile, tiles = num_tiles(chunk.num_rows);
  const std::int64_t first_row = index % tiles * kTileRows, left = chunk.num_rows - first_row;
  return {chunk.row_begin + first_row, index / tiles,
          left < kTileRows ? static_cast<int>(left) : kTileRows,
          chunk.packed + index * params.form.tile_bytes()};
}

CP_DEVICE void pack_query_panels(const PackQueriesParams& params, const QueryTile& tile,
                                 const float* lse) {
  constexpr int kRowPieces = kPanelColumns / kPieceChannels, kPieces = kTileRows * kRowPieces;
  for (int i = static_cast<int>(threadIdx.x); i < params.form.q_panels * kPieces;
       i += kPackQueryThreads) {
    const int row = i / kRowPieces % kTileRows;
    const int channel = i / kPieces * kPanelColumns + i % kRowPieces * kPieceChannels;
    Piece piece{};
    if (lse[row] != -INFINITY && channel < params.q.dim) {
      piece = load_piece(params.q, tile.row + row, tile.head, channel);
    }
    *reinterpret_cast<Piece*>(tile.packed + panel_offset(static_cast<std::uint32_t>(row),
                                                         static_cast<std::uint32_t>(channel))) =
        piece;
  }
}

CP_DEVICE float load_channel(const TensorRows& tensor, std::int64_t row, std::int64_t head,
                             int channel, int dim) {
  if (channel >= dim) return 0.0f;
  return load_element(tensor.data, tensor.dtype,
                      row * tensor.row_stride + head * tensor.head_stride + channel);
}

/// Channels [column, column + 64) of dout to their panel; those of dout and out to shared memory.
template <class T>
CP_DEVICE void pack_dout_panel(const PackQueriesParams& params, const QueryTile& tile, int column,
                               const float* lse, float* dout, float* out) {
  std::byte* packed = tile.packed + params.form.q_panels * kPanelBytes;
  constexpr int kPairs = kPanelColumns / 2;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kPairs; i += kPackQueryThreads) {
    const int row = i / kPairs, within = i % kPairs * 2, place = row * kPackStride + within;
    PackedPair pair{};
    if (lse[row] != -INFINITY) {
      const std::int64_t from = tile.row + row;
      const int d = column + within, dim = params.value_dim;
      pair.bits = ptx::pack(load_channel(params.dout, from, tile.head, d, dim),
                            load_channel(params.dout, from, tile.head, d + 1, dim), T{});
      dout[place] = ptx::widen(T{static_cast<std::uint16_t>(pair.bits)});
      dout[place + 1] = ptx::widen(T{static_cast<std::uint16_t>(pair.bits >> 16)});
      out[place] = load_channel(params.out, from, tile.head, d, dim);
      out[place + 1] = load_channel(params.out, from, tile.head, d + 1, dim);
    }
    *reinterpret_cast<PackedPair*>(
        packed + panel_offset(static_cast<std::uint32_t>(row),
                              static_cast<std::uint32_t>(column + within))) = pair;
  }
}

/// One block for each tile of each head. A row's delta is one chain of fma, so a thread does a row.
/// Four blocks fill a multiprocessor's shared memory, so registers for more of them would be
/// spilled for nothing.
template <class T>
__global__ void __launch_bounds__(kPackQueryThreads, 4)
    pack_queries_kernel(const __grid_constant__ PackQueriesParams params) {
  CP_DYNAMIC_SMEM(memory);
  float* dout = reinterpret_cast<float*>(memory);
  float* out = dout + kTileRows * kPackStride;
  float* lse = out + kTileRows * kPackStride;
  const QueryTile tile = query_tile(params);
  const int me = static_cast<int>(threadIdx.x);
  const std::int64_t my_row = tile.row + me;
  if (me < kTileRows) {
    lse[me] =
        me < tile.num_rows
            ? params.lse.data[my_row * params.lse.row_stride + tile.head * params.lse.head_stride]
            : -INFINITY;
  }
  __syncthreads();
  pack_query_panels(params, tile, lse);
  const bool is_used = me < kTileRows && lse[me] != -INFINITY;
  float sum = 0.0f;
  for (int column = 0; column < params.value_dim; column += kPanelColumns) {
    pack_dout_panel<T>(params, tile, column, lse, dout, out);
    __syncthreads();
    const int left = params.value_dim - column;
    const int channels = left < kPanelColumns ? left : kPanelColumns;
    for (int i = 0; is_used && i < channels; ++i) {
      sum = fmaf(dout[me * kPackStride + i], out[me * kPackStride + i], sum);
    }
    __syncthreads();  // before the panel is overwritten
  }
  if (me >= kTileRows) return;
  if (is_used && params.dlse.data != nullptr) {
    sum -= params.dlse.data[my_row * params.dlse.row_stride + tile.head * params.dlse.head_stride];
  }
  float* scalars = reinterpret_cast<float*>(tile.packed + params.form.panel_bytes());
  scalars[me] = static_cast<float>(static_cast<double>(lse[me]) * kLog2e);
  scalars[kTileRows + me] = sum;
}

}  // namespace cpattn::cuda
