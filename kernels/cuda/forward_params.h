// What the 16-bit forward kernels take: one struct of numbers and device addresses, made from
// ForwardArgs; and the pieces of work it describes.
#pragma once

#include "kernels/cuda/accumulator.h"
#include "kernels/cuda/pieces.h"
#include "kernels/cuda/tile_form.h"
#include "kernels/cuda/tile_program.h"

namespace cpattn::cuda {

/// The multiplier of q.k in the exponent of 2, made positive so that the largest score is the
/// largest logit: a negative sign moves into q, exactly; a scale of 0 becomes q * 0, which is NaN
/// where q is not finite, and a multiplier of 1.
struct ScoreScale {
  float multiplier = 1.0f;
  bool is_zero = false;
  bool is_negative = false;
};
ScoreScale score_scale(double softmax_scale);

struct ForwardParams {
  const StepImage* image = nullptr;
  PieceRows q;
  ScoreScale scale;
  int num_heads = 1;
  int group_size = 1;  ///< query heads of a kv head
  int value_dim = 1;
  KvForm form;
  StateShape carried_shape;
  std::byte* carried = nullptr;
  std::int64_t carried_slot_bytes = 0;
  StateShape scratch_shape;  ///< of one tile: a thread block has num_scratch_slots of these
  std::byte* scratch = nullptr;
  std::int64_t scratch_slot_bytes = 0;
  int num_scratch_slots = 0;
  ResultRows result;
  float* head_maxima = nullptr;
};

/// For tiles of `tile_rows` query rows.
ForwardParams forward_params(const ForwardArgs& args, int tile_rows);

/// KernelTable's sizes of the 16-bit forward.
StateShape carried_shape(const KernelProblem& problem);
std::size_t forward_workspace_bytes(const KernelProblem& problem, const StepLimits& limits,
                                    int tile_rows);

/// Thread blocks for a step: as many as work at a time, or fewer if there is less to do.
unsigned forward_blocks(const ForwardArgs& args, int tile_rows);

/// One row tile of one head.
struct ForwardItem {
  const TileProgram* program = nullptr;
  int first_row = 0;  ///< of the tile within its chunk
  int num_rows = 0;   ///< of the tile that exist
  int head = 0;
};

/// Heads change fastest, so that neighbours share keys and all heads of a long tile begin early.
CP_DEVICE ForwardItem forward_item(const ForwardParams& params, int index, int tile_rows) {
  const StepImage& image = *params.image;
  const RowTile tile = image.part<RowTile>(image.tiles)[index / params.num_heads];
  const TileProgram* program = image.part<TileProgram>(image.programs) + tile.program;
  const int rows = program->num_rows - tile.first_row;
  return {program, tile.first_row, rows < tile_rows ? rows : tile_rows, index % params.num_heads};
}

/// Rows [row, row + 16) of an item's tile, in a slot of its program.
CP_DEVICE StripOfSlot strip_of_slot(const ForwardParams& params, const ForwardItem& item,
                                    SlotIndex slot, int row) {
  const int num_rows = item.num_rows - row;
  if (slot < 0) {  // is_scratch(), scratch_number(): not for device code
    std::byte* const memory =
        params.scratch + (std::int64_t{blockIdx.x} * params.num_scratch_slots + (-1 - slot)) *
                             params.scratch_slot_bytes;
    return {state_slot_at(params.scratch_shape, memory), row, params.scratch_shape.padded_dim(),
            num_rows};
  }
  return {state_slot_at(params.carried_shape, params.carried + slot * params.carried_slot_bytes),
          item.head * params.carried_shape.num_rows + item.first_row + row,
          params.carried_shape.padded_dim(), num_rows};
}

CP_DEVICE StripOfResult strip_of_result(const ForwardParams& params, const ForwardItem& item,
                                        int row) {
  return {params.result, item.program->row_begin + item.first_row + row, item.head,
          params.value_dim, item.num_rows - row};
}

template <class T>
inline constexpr std::uint32_t kExponentBits = 0x7f80;
template <>
inline constexpr std::uint32_t kExponentBits<f16> = 0x7c00;

/// 1 in both halves of a word.
template <class T>
inline constexpr std::uint32_t kOnes = 0x3f803f80;
template <>
inline constexpr std::uint32_t kOnes<f16> = 0x3c003c00;

/// All bits of those halves of a word that are infinite or NaN.
template <class T>
CP_DEVICE std::uint32_t special_halves(std::uint32_t word) {
  constexpr std::uint32_t kLow = kExponentBits<T>, kHigh = kLow << 16;
  return ((word & kLow) == kLow ? 0xffffu : 0u) | ((word & kHigh) == kHigh ? 0xffff0000u : 0u);
}

/// Elements of q with the sign of the scale, or times a scale of 0.
template <class T>
CP_DEVICE Piece scaled_query(Piece piece, const ScoreScale& scale) {
  CP_UNROLL
  for (std::uint32_t& word : piece.word) {
    if (scale.is_zero) {
      word = special_halves<T>(word);  // all bits set: a NaN
    } else if (scale.is_negative) {
      word ^= 0x80008000u;
    }
  }
  return piece;
}

}  // namespace cpattn::cuda
