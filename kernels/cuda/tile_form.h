// The packed form of the 16-bit CUDA kernels: shards as images of shared memory.
//
// Keys (and, in the backward, queries) are cut into tiles of 64 rows, channels into *panels* of 64,
// padded with zeros to whole ones. A panel is 64 rows of 128 bytes, permuted as TMA and wgmma
// permute (Swizzle::bytes128), so a plain copy of consecutive bytes makes what ldmatrix and wgmma
// read without bank conflicts, no kernel guards rows or columns, and what travels between ranks is
// what is computed on.
//
//   packed kv chunk    for each kv head, for each tile: K panels, V panels
//   packed q chunk     for each query head, for each tile: q panels, dout panels, lse[64],
//   delta[64]
#pragma once

#include "kernels/cuda/swizzle.h"

namespace cpattn::cuda {

inline constexpr int kTileRows = 64;
inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelBytes = kTileRows * kPanelColumns * 2;

CP_SHARED_BY_HOST constexpr int num_panels(std::int64_t dim) {
  return static_cast<int>((dim + kPanelColumns - 1) / kPanelColumns);
}
CP_SHARED_BY_HOST constexpr std::int64_t num_tiles(std::int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

/// Byte of element (row, column) of a tile whose panels follow each other; 16-byte pieces of a row
/// stay whole.
CP_SHARED_BY_HOST constexpr std::uint32_t panel_offset(std::uint32_t row, std::uint32_t column) {
  return column / kPanelColumns * kPanelBytes +
         swizzled(row * 128 + column % kPanelColumns * 2, Swizzle::bytes128);
}

/// Sizes of a packed kv chunk of `num_keys` keys.
struct KvForm {
  int k_panels = 1;
  int v_panels = 1;

  CP_SHARED_BY_HOST constexpr std::int64_t k_tile_bytes() const {
    return std::int64_t{k_panels} * kPanelBytes;
  }
  CP_SHARED_BY_HOST constexpr std::int64_t tile_bytes() const {
    return std::int64_t{k_panels + v_panels} * kPanelBytes;
  }
  CP_SHARED_BY_HOST constexpr std::int64_t head_bytes(std::int64_t num_keys) const {
    return num_tiles(num_keys) * tile_bytes();
  }
};

/// Sizes of a packed q chunk of `num_rows` rows; dout has as many panels as v.
struct QueryForm {
  int q_panels = 1;
  int dout_panels = 1;

  CP_SHARED_BY_HOST constexpr std::int64_t panel_bytes() const {
    return std::int64_t{q_panels + dout_panels} * kPanelBytes;
  }
  CP_SHARED_BY_HOST constexpr std::int64_t tile_bytes() const {
    return panel_bytes() + 2 * kTileRows * 4;
  }
  CP_SHARED_BY_HOST constexpr std::int64_t head_bytes(std::int64_t num_rows) const {
    return num_tiles(num_rows) * tile_bytes();
  }
};

}  // namespace cpattn::cuda
