// What a thread block executes for one tile of query rows and one head: the StateOps of
// block_attention.h, lowered to a machine with one accumulator.
//
// The accumulator is a state (m, l, o) in registers. Every state of a program is read once (the
// schedule is a tree), so a state that the next op reads stays in registers, and one that is needed
// later goes to memory. With one kv chunk nothing but the result is ever written. Merging here is
// merge_states (states.h), element by element: the same bits.
//
// A step's programs are written as one *image*, once per plan, which lies in device memory for
// good: launches take pointers only, so they can be captured and replayed. Images are read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/block_attention.h"
#include "kernels/cuda/compat.h"

namespace cpattn::cuda {

enum class TileOpKind : std::int32_t {
  load,            ///< accumulator = slot
  block,           ///< accumulator = the state of `kv_block`, from a fresh start
  accumulate,      ///< accumulator continued over `kv_block`
  merge_left,      ///< accumulator = merge(slot, accumulator)
  merge_right,     ///< accumulator = merge(accumulator, slot)
  store,           ///< slot = accumulator
  finalize,        ///< out, lse = result of the accumulator
  finalize_empty,  ///< out = 0, lse = -inf
};

struct TileOp {
  TileOpKind kind = TileOpKind::block;
  SlotIndex slot = 0;
  std::int32_t kv_block = 0;
  /// Row i of the *chunk* sees the keys [0, clamp(first_row_limit + i, 0, num_keys)) of the kv
  /// block: full masks have first_row_limit = num_keys.
  std::int32_t first_row_limit = 0;
};

/// Ops [op_begin, op_end) for the rows of one q chunk.
struct TileProgram {
  std::int64_t row_begin = 0;  ///< local row of q, out, lse
  std::int32_t num_rows = 0;
  std::int32_t op_begin = 0;
  std::int32_t op_end = 0;

  CP_SHARED_BY_HOST std::int32_t num_ops() const { return op_end - op_begin; }
};

/// The unit of work: rows [first_row, first_row + tile_rows) of a program's chunk, as far as there
/// are any. Ordered by work, most first, so that the last blocks to start are short.
struct RowTile {
  std::int32_t program = 0;
  std::int32_t first_row = 0;  ///< within the chunk
};

struct KeyBlock {
  const std::byte* packed = nullptr;
  std::int64_t num_keys = 0;
};

/// An image in memory. The parts follow this header, each at a multiple of 16 bytes; offsets are
/// from its beginning.
struct StepImage {
  std::int32_t num_tiles = 0;
  std::int32_t num_programs = 0;
  std::int32_t num_ops = 0;
  std::int32_t num_kv_blocks = 0;
  std::int64_t tiles = 0;  ///< RowTile
  std::int64_t programs = 0;
  std::int64_t ops = 0;
  std::int64_t kv_blocks = 0;

  template <class T>
  CP_SHARED_BY_HOST const T* part(std::int64_t offset) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(this) + offset);
  }
};

/// The lowered form of one program.
std::vector<TileOp> lower(std::span<const StateOp> ops, std::span<const KvBlock> kv_blocks);

/// The image of a step for tiles of `tile_rows` rows: args.kv_blocks and args.programs are all that
/// is read. Host bytes, to be copied to the device as they are; a multiple of 16.
std::vector<std::byte> make_step_image(const ForwardArgs& args, int tile_rows);

}  // namespace cpattn::cuda
