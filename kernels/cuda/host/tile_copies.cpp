#include "kernels/cuda/host/tile_copies.h"

#include "kernels/cuda/host/block.h"
#include "kernels/cuda/host/mbarrier.h"
#include "kernels/cuda/host/sanitizers.h"

namespace cpattn::cuda_host {
namespace {

unsigned box_bytes(const TensorMap& map) {
  unsigned bytes = map.element_bytes;
  for (const std::uint16_t extent : map.box) bytes *= extent;
  return bytes;
}

/// visit(element's place in the tensor or null, its address in shared memory) for the whole box.
template <class Visit>
void for_each_element(const TileCopy& copy, const Visit& visit) {
  const TensorMap& map = copy.map;
  SharedAddress plain = copy.to;
  std::int64_t at[4];
  for (unsigned i3 = 0; i3 < map.box[3]; ++i3) {
    at[3] = copy.first[3] + std::int64_t{i3};
    for (unsigned i2 = 0; i2 < map.box[2]; ++i2) {
      at[2] = copy.first[2] + std::int64_t{i2};
      for (unsigned i1 = 0; i1 < map.box[1]; ++i1) {
        at[1] = copy.first[1] + std::int64_t{i1};
        for (unsigned i0 = 0; i0 < map.box[0]; ++i0, plain += map.element_bytes) {
          at[0] = copy.first[0] + std::int64_t{i0};
          bool is_inside = true;
          std::int64_t offset = 0;
          for (int d = 0; d < 4; ++d) {
            is_inside = is_inside && at[d] >= 0 && at[d] < map.shape[d];
            offset += at[d] * map.strides_bytes[d];
          }
          visit(is_inside ? map.base + offset : nullptr, swizzled(plain, map.swizzle));
        }
      }
    }
  }
}

void land(Block& block, const TileCopy& copy) {
  std::byte* shared = block.shared().data() - kSharedBegin;
  const unsigned size = copy.map.element_bytes;
  for_each_element(copy, [&](const std::byte* from, SharedAddress to) {
    for (unsigned i = 0; i < size; ++i) shared[to + i] = from != nullptr ? from[i] : std::byte{0};
  });
  mbarrier_complete_bytes(block, copy.barrier, box_bytes(copy.map));
}

void start(const TileCopy& copy, unsigned alignment) {
  const unsigned bytes = box_bytes(copy.map);
  std::byte* place = shared_place(copy.to, bytes, alignment);
  // To the thread sanitizer the copy happens here, whenever it lands: the thread that starts it is
  // the one that knows the destination to be free.
  announce_write(place, bytes);
  for_each_element(copy, [&](const std::byte* from, SharedAddress) {
    if (from != nullptr) announce_read(from, copy.map.element_bytes);
    if (from != nullptr && is_forbidden(from, copy.map.element_bytes)) {
      fail("TMA: the source is memory that is not allocated");
    }
  });
  mbarrier_release(copy.barrier);
  Block& block = *current_thread->block;
  if (block.options().landing == Landing::early) {
    land(block, copy);
    return;
  }
  // Volatile: no memset, which the thread sanitizer would take for a write by this thread.
  volatile std::byte* const fill = place;
  for (unsigned i = 0; i < bytes; ++i) fill[i] = std::byte{0xff};
  if (block.tile_copies().size() == kMaxTileCopies) {
    fail("TMA: more than ", kMaxTileCopies, " tiles under way");
  }
  block.tile_copies().push_back(copy);
}

}  // namespace

void copy_tile(SharedAddress to, const TensorMap& map, const std::int32_t* first, int rank,
               SharedAddress barrier) {
  if (map.rank != rank) fail("TMA: a load of ", rank, " dimensions from a map of ", map.rank + 0);
  TileCopy copy{to, barrier, map, {}};
  for (int d = 0; d < rank; ++d) copy.first[d] = first[d];
  start(copy, map.swizzle == Swizzle::none ? 128 : pattern_bytes(map.swizzle));
}

void copy_bytes(SharedAddress to, const void* from, unsigned num_bytes, SharedAddress barrier) {
  constexpr unsigned kUnit = 16;
  if (reinterpret_cast<std::uintptr_t>(from) % kUnit != 0) {
    fail("cp.async.bulk: the global address is not a multiple of 16");
  }
  if (num_bytes % kUnit != 0) fail("cp.async.bulk: ", num_bytes, " bytes; no multiple of 16");
  // A tensor of one dimension with elements of 16 bytes.
  TensorMap map;
  map.base = static_cast<const std::byte*>(from);
  map.strides_bytes[0] = kUnit;
  map.shape[0] = num_bytes / kUnit;
  map.box[0] = static_cast<std::uint16_t>(num_bytes / kUnit);
  map.rank = 1;
  map.element_bytes = kUnit;
  start({to, barrier, map, {}}, kUnit);
}

bool land_tiles(Block& block) {
  std::vector<TileCopy>& copies = block.tile_copies();
  if (copies.empty()) return false;
  const auto is_due = [barrier = copies.back().barrier](const TileCopy& copy) {
    return copy.barrier == barrier;
  };
  for (const TileCopy& copy : copies) {
    if (is_due(copy)) land(block, copy);
  }
  std::erase_if(copies, is_due);
  return true;
}

}  // namespace cpattn::cuda_host
