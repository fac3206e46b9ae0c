// The dk, dv kernel of backward_sm80.h: a thread block owns some keys of a kv block for one kv head
// and walks the tasks of that block; the queries of all heads of the group pass by, head by head,
// rows ascending.
//
// S^T = K Q^T and dP^T = V dO^T, so what is made of them is the left operand of dV += P^T dO and
// dK += dS^T Q.
#pragma once

#include "kernels/cuda/backward_tile_sm80.cuh"

namespace cpattn::cuda::sm80_gradient {

/// What one launch accumulates. Registers hold sums of 256 channels for 16 keys of a warp, so for
/// wider heads there are two launches, one of which computes S only.
enum class DkvPart { both, dk, dv };

template <class C, DkvPart kPart>
struct DkvSums {
  static constexpr bool kHasDk = kPart != DkvPart::dv;
  static constexpr bool kHasDv = kPart != DkvPart::dk;
  Sums<C> dk;
  Sums<C> dv;
};

/// The rows of a q chunk that see keys of the tile, as slices: of each head those from `first` on.
struct QuerySlices {
  const std::byte* packed = nullptr;
  int num_rows = 0;
  int first = 0;
  int per_head = 0;  ///< from first on
  int first_head = 0;
};

template <class C>
CP_DEVICE QuerySlices query_slices(const BackwardParams& params, const KeyItem& item,
                                   const GradientOp& op) {
  const GradientRows& rows = params.image->part<GradientRows>(params.image->rows)[op.partner];
  const int first_row = item.first + 1 - op.first_row_limit;  // the first that sees the first key
  const int first = first_row > 0 ? first_row / C::kSliceRows : 0;
  const int slices = (rows.num_rows + C::kSliceRows - 1) / C::kSliceRows;
  return {rows.packed, rows.num_rows, first, slices > first ? slices - first : 0,
          item.head * params.group_size()};
}

/// Starts the copies of slice `row / kSliceRows` of a head: panels, lse, delta.
template <class C>
CP_DEVICE void load_queries(const BackwardParams& params, const QuerySlices& slices, int head,
                            int row, ptx::SharedAddress to, ptx::SharedAddress scalars_to) {
  const QueryForm form = params.query_form();
  const std::byte* const tile =
      slices.packed + head * form.head_bytes(slices.num_rows) + row / kTileRows * form.tile_bytes();
  const int within = row % kTileRows;
  load_slice<C>(tile + within * static_cast<int>(kRowBytes), params.num_panels(), to);
  constexpr int kPieces = C::kSliceRows * 4 / 16;
  const int piece = static_cast<int>(threadIdx.x);
  if (piece < 2 * kPieces) {  // lse, then delta
    ptx::copy_async16(scalars_to + static_cast<std::uint32_t>(piece) * 16,
                      tile + form.panel_bytes() + (piece / kPieces * kTileRows + within) * 4 +
                          piece % kPieces * 16,
                      true);
  }
}

/// Scores to P^T and dots to dS^T. Rows that saw no key at all (lse = -inf) contribute nothing.
template <class C>
CP_DEVICE void weigh_keys(const BackwardParams& params, const KeyStrip& strip, const float* scalars,
                          Scores<C>& s, Scores<C>& dp) {
  const StripLane lane;
  CP_UNROLL
  for (int n = 0; n < 2 * C::kSteps; ++n) {
    CP_UNROLL
    for (int column = 0; column < 2; ++column) {
      const int k = 8 * n + lane.channel + column;
      const float lse = scalars[k];
      const float delta = C::kFault == Fault::delta_ignored ? 0.0f : scalars[C::kSliceRows + k];
      const bool is_used = lse != -INFINITY;
      CP_UNROLL
      for (int half = 0; half < 2; ++half) {
        weigh_pair(params.scale_log2, lse, delta, is_used && strip.sees(lane.row + 8 * half, k),
                   s[n][2 * half + column], dp[n][2 * half + column]);
      }
    }
  }
}

/// One slice of one head for the strip of the calling warp.
template <class C, DkvPart kPart>
CP_DEVICE void multiply_queries(const BackwardParams& params, const KeyStrip& strip,
                                ptx::SharedAddress own, ptx::SharedAddress q, const float* scalars,
                                bool is_partial, DkvSums<C, kPart>& sums) {
  const ptx::SharedAddress v = own + static_cast<std::uint32_t>(params.qk_panels) * kPanelBytes;
  const ptx::SharedAddress dout =
      q + static_cast<std::uint32_t>(params.qk_panels) * C::kSlicePanelBytes;
  const auto sees = [&](int i, int k) { return strip.sees(i, k); };
  Scores<C> s, dp;
  multiply_rows<C>(own, q, params.qk_panels, s);
  if (DkvSums<C, kPart>::kHasDk) {
    multiply_rows<C>(v, dout, params.v_panels, dp);
  } else {
    CP_UNROLL
    for (int n = 0; n < 2 * C::kSteps; ++n) {
      CP_UNROLL
      for (int i = 0; i < 4; ++i) dp[n][i] = 0.0f;
    }
  }
  weigh_keys<C>(params, strip, scalars, s, dp);
  Weights<C> w;
  if (DkvSums<C, kPart>::kHasDv) {
    round_weights<C>(s, w);
    add_product<C>(w, dout, params.v_panels, is_partial, sees, sums.dv);
  }
  if (DkvSums<C, kPart>::kHasDk) {
    round_weights<C>(dp, w);
    add_product<C>(w, q, params.qk_panels, is_partial, sees, sums.dk);
  }
}

/// The sums go on over one q chunk. Called by all threads of the block.
template <class C, DkvPart kPart>
CP_DEVICE void add_leaf(const BackwardParams& params, const KeyItem& item, const GradientOp& op,
                        const Layout<C>& layout, int& stage, DkvSums<C, kPart>& sums) {
  const QuerySlices slices = query_slices<C>(params, item, op);
  const int warp = warp_index();
  const int first_key = item.first + warp * kStripRows, num_keys = item.keys->num_keys;
  const ptx::SharedAddress own =
      layout.own + static_cast<std::uint32_t>(
                       warp / (kTileRows / kStripRows) * params.num_panels() * kPanelBytes +
                       warp % (kTileRows / kStripRows) * kStripRows * static_cast<int>(kRowBytes));
  const auto head_of = [&](int i) { return slices.first_head + i / slices.per_head; };
  const auto row_of = [&](int i) { return (slices.first + i % slices.per_head) * C::kSliceRows; };
  run_slices<C>(
      slices.per_head * params.group_size(), stage,
      [&](int i, int to) {
        load_queries<C>(params, slices, head_of(i), row_of(i), layout.slice(to),
                        layout.own + layout.scalars_of(to));
      },
      [&](int i, int from) {
        const KeyStrip strip{first_key, row_of(i), op.first_row_limit};
        const int rows = slices.num_rows - strip.row;  // from here on
        const int last_row = (rows < C::kSliceRows ? rows : C::kSliceRows) - 1;
        if (first_key >= num_keys || !strip.sees(0, last_row)) return;  // nothing but zeros
        const int keys = num_keys - first_key;
        const int last_key = (keys < kStripRows ? keys : kStripRows) - 1;
        multiply_queries<C, kPart>(
            params, strip, own, layout.slice(from),
            reinterpret_cast<const float*>(layout.memory + layout.scalars_of(from)),
            !strip.sees(last_key, 0), sums);
      });
}

/// The strips of dk and dv of the calling warp in a slot.
template <class C, DkvPart kPart>
CP_DEVICE void execute_on_slot(const BackwardParams& params, const KeyItem& item,
                               const GradientOp& op, DkvSums<C, kPart>& sums) {
  const GradientSlotForm& form = params.slot_form;
  const int num_keys = item.keys->num_keys;
  const int first_key = item.first + warp_index() * kStripRows;
  float* const head =
      reinterpret_cast<float*>(params.image->part<std::byte*>(params.image->dkv_slots)[op.slot]) +
      item.head * form.head_floats(num_keys);
  if (DkvSums<C, kPart>::kHasDk) {
    float* const dk = head + std::int64_t{first_key} * form.dk_floats();
    execute_on_sums(op.kind, {dk, form.dk_floats(), num_keys - first_key}, sums.dk);
  }
  if (DkvSums<C, kPart>::kHasDv) {
    float* const dv = head + std::int64_t{num_keys} * form.dk_floats() +
                      std::int64_t{first_key} * form.dv_floats();
    execute_on_sums(op.kind, {dv, form.dv_floats(), num_keys - first_key}, sums.dv);
  }
}

template <class C, DkvPart kPart>
CP_DEVICE void execute(const BackwardParams& params, const KeyItem& item, const GradientOp& op,
                       const Layout<C>& layout, int& stage, DkvSums<C, kPart>& sums) {
  switch (op.kind) {
    case GradientOpKind::leaf:
      if (C::kFault != Fault::sums_not_reset) {
        if (DkvSums<C, kPart>::kHasDk) clear_sums(sums.dk);
        if (DkvSums<C, kPart>::kHasDv) clear_sums(sums.dv);
      }
      add_leaf<C, kPart>(params, item, op, layout, stage, sums);
      break;
    case GradientOpKind::continue_leaf:
      add_leaf<C, kPart>(params, item, op, layout, stage, sums);
      break;
    case GradientOpKind::load:
    case GradientOpKind::add:
    case GradientOpKind::store:
      execute_on_slot<C, kPart>(params, item, op, sums);
      break;
    case GradientOpKind::finish:  // of dq only
      break;
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C, DkvPart kPart>
__global__ void __launch_bounds__(C::kThreads)
    dkv_kernel(const __grid_constant__ BackwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  const GradientImage& image = *params.image;
  const Layout<C> layout(params, memory);
  const std::int64_t num_items = std::int64_t{image.num_key_tiles} * params.num_kv_heads;
  int stage = 0;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const KeyItem item = key_item(params, i);
    const KvForm form = params.kv_form();
    __syncthreads();  // no warp reads the last item's keys
    load_own<C>(item.keys->packed + item.head * form.head_bytes(item.keys->num_keys) +
                    item.first / kTileRows * form.tile_bytes(),
                form.tile_bytes(), item.keys->num_keys - item.first, params.num_panels(),
                layout.own);
    DkvSums<C, kPart> sums;
    if (C::kFault == Fault::sums_not_reset) {
      clear_sums(sums.dk);
      clear_sums(sums.dv);
    }
    for (std::int32_t place = item.keys->op_begin; place < item.keys->op_end; ++place) {
      execute<C, kPart>(params, item, image.part<GradientOp>(image.ops)[place], layout, stage,
                        sums);
    }
    ptx::wait_copies<0>();  // also where no row sees a key
  }
}

}  // namespace cpattn::cuda::sm80_gradient
