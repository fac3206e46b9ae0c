// Pieces: 16 bytes, eight 16-bit channels of a row, the unit in which tensors of callers become
// packed panels. Rows have any strides; only whole, aligned pieces are read at once.
#pragma once

#include "kernels/cuda/compat.h"
#include "src/base/tensor_view.h"

namespace cpattn::cuda {

struct CP_MAY_ALIAS Piece {
  alignas(16) std::uint32_t word[4];
};
struct CP_MAY_ALIAS HalfWord {
  std::uint16_t bits;
};
inline constexpr int kPieceChannels = 8;

/// A caller's tensor [rows, heads, dim] of 16-bit elements; strides in elements.
struct PieceRows {
  const void* elements = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  int dim = 0;
  bool is_aligned = false;  ///< every row begins at a multiple of 16 bytes
};

inline PieceRows piece_rows(const AnyConstTensor& tensor) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(tensor.data) % sizeof(Piece) == 0 &&
                          tensor.strides[0] % kPieceChannels == 0 &&
                          tensor.strides[1] % kPieceChannels == 0;
  return {tensor.data, tensor.strides[0], tensor.strides[1], static_cast<int>(tensor.shape[2]),
          is_aligned};
}

/// Channels [channel, channel + 8) of a row; zeros from `dim` on.
CP_DEVICE Piece load_piece(const PieceRows& tensor, std::int64_t row, std::int64_t head,
                           int channel) {
  const HalfWord* from = static_cast<const HalfWord*>(tensor.elements) + row * tensor.row_stride +
                         head * tensor.head_stride + channel;
  if (tensor.is_aligned && channel + kPieceChannels <= tensor.dim) {
    return *reinterpret_cast<const Piece*>(from);
  }
  Piece piece;
  CP_UNROLL
  for (int i = 0; i < kPieceChannels / 2; ++i) {
    const std::uint32_t low = channel + 2 * i < tensor.dim ? from[2 * i].bits : 0;
    const std::uint32_t high = channel + 2 * i + 1 < tensor.dim ? from[2 * i + 1].bits : 0;
    piece.word[i] = low | high << 16;
  }
  return piece;
}

}  // namespace cpattn::cuda
