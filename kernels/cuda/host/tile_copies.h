// TMA on the host: tiles of a tensor, or plain bytes, to shared memory, reported to an mbarrier.
//
// Landing::late: a tile lands only when no thread of the block can do anything else, the latest
// moment a kernel can count on; until then its destination holds NaN.
#pragma once

#include <cstdint>

#include "kernels/cuda/host/thread.h"
#include "kernels/cuda/swizzle.h"

namespace cpattn::cuda_host {

using cuda::Swizzle;

/// What the device's 128 opaque bytes hold here.
struct alignas(64) TensorMap {
  const std::byte* base = nullptr;
  std::int64_t strides_bytes[4] = {};  ///< of dimensions 0 .. 3
  std::int64_t shape[4] = {1, 1, 1, 1};
  std::uint16_t box[4] = {1, 1, 1, 1};
  std::uint8_t rank = 0;
  std::uint8_t element_bytes = 0;
  Swizzle swizzle = Swizzle::none;
};

static_assert(sizeof(TensorMap) <= 128);

/// Under way in one block; the list of them is allocated once.
inline constexpr std::size_t kMaxTileCopies = 512;

struct TileCopy {
  SharedAddress to = 0;
  SharedAddress barrier = 0;
  TensorMap map;  ///< a copy: a kernel's parameters are gone when its thread exits
  std::int32_t first[4] = {};
};

/// The box at `first` (rank numbers, innermost first); elements outside of the tensor are zeros.
void copy_tile(SharedAddress to, const TensorMap& map, const std::int32_t* first, int rank,
               SharedAddress barrier);

/// `num_bytes` as they are.
void copy_bytes(SharedAddress to, const void* from, unsigned num_bytes, SharedAddress barrier);

/// For Block: nobody can run, so something that is under way arrives: all that is reported to the
/// barrier that the newest copy is reported to. So copies of different barriers overtake each
/// other, as they may on a device. False where nothing is under way.
bool land_tiles(Block& block);

}  // namespace cpattn::cuda_host
