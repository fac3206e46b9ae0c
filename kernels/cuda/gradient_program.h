// What thread blocks execute in a step of the backward: the tasks of block_gradient.h, lowered to
// machines with one accumulator.
//
// Two walks over the same tasks. A thread block of the dq walk owns some rows of a q chunk (of one
// query head) and executes the tasks of that chunk in order; one of the dk, dv walk owns some keys
// of a kv block (of one kv head) and executes the tasks of that block in order. So each element of
// each slot has one owner for the whole step: no atomics, no waiting, no order but that of the
// tasks, and the scores are computed twice. A leaf, which is made in registers, goes to memory only
// where no sum takes it up at once; what a sum has read nobody else reads (sums are trees).
// left + right and right + left are the same bits.
//
// The image holds all addresses: launches take pointers only, so they can be captured and replayed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/block_gradient.h"
#include "kernels/cuda/compat.h"

namespace cpattn::cuda {

enum class GradientOpKind : std::int32_t {
  load,           ///< accumulator = slot
  leaf,           ///< accumulator = the leaf with `partner`, from a fresh start
  continue_leaf,  ///< accumulator continued with `partner`
  add,            ///< accumulator = accumulator + slot
  store,          ///< slot = accumulator
  finish,         ///< dq of the rows = scale * accumulator
};

struct GradientOp {
  GradientOpKind kind = GradientOpKind::leaf;
  SlotIndex slot = 0;
  std::int32_t partner = 0;  ///< kv block in the dq walk, q chunk in the dk, dv walk
  /// Row i of the q chunk sees keys [0, clamp(first_row_limit + i, 0, num_keys)) of the kv block:
  /// full masks have first_row_limit = num_keys.
  std::int32_t first_row_limit = 0;
};

/// A q chunk and its ops in the dq walk.
struct GradientRows {
  const std::byte* packed = nullptr;
  std::int64_t row_begin = 0;  ///< local row of dq
  std::int32_t num_rows = 0;
  std::int32_t op_begin = 0;
  std::int32_t op_end = 0;
};

/// A kv block and its ops in the dk, dv walk.
struct GradientKeys {
  const std::byte* packed = nullptr;
  std::int32_t num_keys = 0;
  std::int32_t op_begin = 0;
  std::int32_t op_end = 0;
};

/// The unit of work, together with a head: rows or keys from `first` on of an owner. Ordered by
/// work, most first, so that the last ones to start are short.
struct GradientTile {
  std::int32_t owner = 0;  ///< index of GradientRows or GradientKeys
  std::int32_t first = 0;
};

/// An image in memory: this header, then the parts at these offsets from its beginning.
struct GradientImage {
  std::int32_t num_row_tiles = 0;
  std::int32_t num_key_tiles = 0;
  std::int64_t row_tiles = 0;  ///< GradientTile; owners without tasks have none
  std::int64_t key_tiles = 0;  ///< GradientTile; likewise
  std::int64_t rows = 0;       ///< GradientRows, one for each q chunk
  std::int64_t keys = 0;       ///< GradientKeys, one for each kv block
  std::int64_t ops = 0;        ///< GradientOp
  std::int64_t dkv_slots = 0;  ///< std::byte*: BackwardArgs::dkv_slots

  template <class T>
  CP_SHARED_BY_HOST const T* part(std::int64_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(this) + offset);
  }
};

/// What of the tasks concerns dq of each q chunk, and dk, dv of each kv block, in order.
std::vector<std::vector<GradientOp>> lower_dq(const BackwardArgs& args);
std::vector<std::vector<GradientOp>> lower_dkv(const BackwardArgs& args);

/// Rows of a dq tile and keys of a dk, dv tile.
struct GradientTileSizes {
  int rows = 0;
  int keys = 0;
};

/// The image of a step, host bytes to be copied to the device as they are. Reads the addresses,
/// lengths, tasks and sums of `args`; InvalidArgument for a scratch leaf that the task's first sum
/// does not take up.
std::vector<std::byte> make_gradient_image(const BackwardArgs& args, GradientTileSizes sizes);

}  // namespace cpattn::cuda
