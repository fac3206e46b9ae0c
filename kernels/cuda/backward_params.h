// What the backward kernels take: one struct of numbers and device addresses, made from
// BackwardArgs; and the pieces of work it describes.
#pragma once

#include <algorithm>

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/gradient_program.h"
#include "kernels/cuda/gradient_slots.h"
#include "kernels/cuda/tile_form.h"
#include "src/base/integers.h"

namespace cpattn::cuda {

struct BackwardParams {
  const GradientImage* image = nullptr;
  int num_heads = 1;
  int num_kv_heads = 1;
  int qk_panels = 1;  ///< of q and k, 16-bit
  int v_panels = 1;   ///< of dout and v, 16-bit
  GradientSlotForm slot_form;
  float scale_log2 = 1.0f;  ///< softmax_scale / ln 2
  float scale = 1.0f;
  std::byte* dq_slots = nullptr;
  std::int64_t dq_slot_bytes = 0;
  std::int64_t dq_slot_rows = 0;  ///< of each head
  void* dq = nullptr;
  DType dq_dtype = DType::f32;
  std::int64_t dq_row_stride = 0;  ///< in elements
  std::int64_t dq_head_stride = 0;

  CP_SHARED_BY_HOST int group_size() const { return num_heads / num_kv_heads; }
  CP_SHARED_BY_HOST int num_panels() const { return qk_panels + v_panels; }
  CP_SHARED_BY_HOST QueryForm query_form() const { return {qk_panels, v_panels}; }
  CP_SHARED_BY_HOST KvForm kv_form() const { return {qk_panels, v_panels}; }
};

BackwardParams backward_params(const BackwardArgs& args);

/// As many thread blocks as work at a time, or fewer if there is less to do.
template <class Chunks, class Length>
unsigned num_blocks(const BackwardArgs& args, const Chunks& chunks, int tile, std::int64_t heads,
                    const Length& length) {
  std::int64_t tiles = 0;
  for (const auto& chunk : chunks) tiles += ceil_div(length(chunk), std::int64_t{tile});
  return narrow<unsigned>(std::min<std::int64_t>(tiles * heads, args.problem.num_threads));
}

/// One row tile of one query head.
struct RowItem {
  const GradientRows* rows = nullptr;
  int first = 0;  ///< row of the tile within its chunk
  int head = 0;
};

/// One key tile of one kv head.
struct KeyItem {
  const GradientKeys* keys = nullptr;
  int first = 0;  ///< key of the tile within its block
  int head = 0;
};

// Heads change fastest: neighbours share keys or queries, and all heads of a long tile begin early.
CP_DEVICE RowItem row_item(const BackwardParams& params, std::int64_t index) {
  const GradientImage& image = *params.image;
  const GradientTile tile = image.part<GradientTile>(image.row_tiles)[index / params.num_heads];
  return {image.part<GradientRows>(image.rows) + tile.owner, tile.first,
          static_cast<int>(index % params.num_heads)};
}
CP_DEVICE KeyItem key_item(const BackwardParams& params, std::int64_t index) {
  const GradientImage& image = *params.image;
  const GradientTile tile = image.part<GradientTile>(image.key_tiles)[index / params.num_kv_heads];
  return {image.part<GradientKeys>(image.keys) + tile.owner, tile.first,
          static_cast<int>(index % params.num_kv_heads)};
}

}  // namespace cpattn::cuda
