// The kernel of pack_kv.h.
#pragma once

#include "kernels/cuda/pieces.h"
#include "kernels/cuda/tile_form.h"

namespace cpattn::cuda {

inline constexpr int kPackThreads = 256;
inline constexpr int kPackChunks = 64;  ///< of one launch: 2 KiB of its 4 KiB of parameters

/// A chunk of a launch; its panels are [first_panel, first_panel of the next).
struct ChunkToPack {
  std::int64_t row_begin = 0;
  std::int64_t num_keys = 0;
  std::int64_t first_panel = 0;
  std::byte* packed = nullptr;
};

struct PackParams {
  PieceRows k, v;
  KvForm form;
  int num_chunks = 0;
  ChunkToPack chunks[kPackChunks];
};

/// One block for each panel.
__global__ void __launch_bounds__(kPackThreads)
    pack_kv_kernel(const __grid_constant__ PackParams params) {
  int place = 0;
  while (place + 1 < params.num_chunks && params.chunks[place + 1].first_panel <= blockIdx.x) {
    ++place;
  }
  const ChunkToPack& chunk = params.chunks[place];
  const int tile_panels = params.form.k_panels + params.form.v_panels;
  const std::int64_t panel = blockIdx.x - chunk.first_panel;
  const std::int64_t tile = panel / tile_panels % num_tiles(chunk.num_keys);
  const std::int64_t head = panel / tile_panels / num_tiles(chunk.num_keys);
  const int within = static_cast<int>(panel % tile_panels);
  const bool is_key = within < params.form.k_panels;
  const PieceRows& tensor = is_key ? params.k : params.v;
  const int column = (is_key ? within : within - params.form.k_panels) * kPanelColumns;
  constexpr int kRowPieces = kPanelColumns / kPieceChannels;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kRowPieces; i += kPackThreads) {
    const int row = i / kRowPieces, channel = i % kRowPieces * kPieceChannels;
    const std::int64_t key = tile * kTileRows + row;
    Piece piece{};
    if (key < chunk.num_keys && column + channel < tensor.dim) {
      piece = load_piece(tensor, chunk.row_begin + key, head, column + channel);
    }
    *reinterpret_cast<Piece*>(
        chunk.packed + panel * kPanelBytes +
        panel_offset(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(channel))) = piece;
  }
}

}  // namespace cpattn::cuda
