// The dq kernel of backward_sm80.h: a thread block owns some rows of a q chunk for one query head
// and walks the tasks of that chunk; keys pass by in ascending order.
//
// S = Q K^T and dP = dO V^T, so what is made of them is the left operand of dQ += dS K.
#pragma once

#include "kernels/cuda/backward_tile_sm80.cuh"

namespace cpattn::cuda::sm80_gradient {

/// Scores to P and dots to dS, for keys from `key` on.
template <class C>
CP_DEVICE void weigh_rows(const BackwardParams& params, const RowStrip& strip,
                          const RowLimits& limits, int key, Scores<C>& s, Scores<C>& dp) {
  const StripLane lane;
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int limit = strip.lse[half] == -INFINITY ? 0 : limits.of_row(lane.row + 8 * half);
    const float delta = C::kFault == Fault::delta_ignored ? 0.0f : strip.delta[half];
    CP_UNROLL
    for (int n = 0; n < 2 * C::kSteps; ++n) {
      CP_UNROLL
      for (int column = 0; column < 2; ++column) {
        weigh_pair(params.scale_log2, strip.lse[half], delta,
                   key + 8 * n + lane.channel + column < limit, s[n][2 * half + column],
                   dp[n][2 * half + column]);
      }
    }
  }
}

/// One slice of keys for the strip of the calling warp.
template <class C>
CP_DEVICE void multiply_keys(const BackwardParams& params, const RowStrip& strip,
                             const RowLimits& limits, int key, ptx::SharedAddress own,
                             ptx::SharedAddress k, Sums<C>& dq) {
  const ptx::SharedAddress dout = own + static_cast<std::uint32_t>(params.qk_panels) * kPanelBytes;
  const ptx::SharedAddress v =
      k + static_cast<std::uint32_t>(params.qk_panels) * C::kSlicePanelBytes;
  Scores<C> s, dp;
  multiply_rows<C>(own, k, params.qk_panels, s);
  multiply_rows<C>(dout, v, params.v_panels, dp);
  weigh_rows<C>(params, strip, limits, key, s, dp);
  Weights<C> w;
  round_weights<C>(dp, w);
  const int keys = limits.num_keys - key;  // from here on
  const int slice_end = key + (keys < C::kSliceRows ? keys : C::kSliceRows);
  add_product<C>(
      w, k, params.qk_panels, limits.of_row(0) < slice_end,
      [&](int row, int i) { return key + i < limits.of_row(row); }, dq);
}

/// The sums go on over one kv block. Called by all threads of the block.
template <class C>
CP_DEVICE void add_leaf(const BackwardParams& params, const RowItem& item, const GradientOp& op,
                        const RowStrip& strip, const Layout<C>& layout, int& stage, Sums<C>& dq) {
  const GradientKeys& keys = params.image->part<GradientKeys>(params.image->keys)[op.partner];
  const int left = item.rows->num_rows - item.first;
  const int tile_rows = left < C::kOwnRows ? left : C::kOwnRows;
  const RowLimits tile_limits{op.first_row_limit + item.first, keys.num_keys};
  const RowLimits limits{op.first_row_limit + strip.row, keys.num_keys};
  const int seen = tile_limits.of_any(tile_rows);
  const int seen_by_strip = limits.of_any(rows_of_strip(strip.num_rows));
  const KvForm form = params.kv_form();
  const std::byte* const head =
      keys.packed + item.head / params.group_size() * form.head_bytes(keys.num_keys);
  const int warp = warp_index();
  const ptx::SharedAddress own =
      layout.own + static_cast<std::uint32_t>(
                       warp / (kTileRows / kStripRows) * params.num_panels() * kPanelBytes +
                       warp % (kTileRows / kStripRows) * kStripRows * static_cast<int>(kRowBytes));
  run_slices<C>((seen + C::kSliceRows - 1) / C::kSliceRows, stage,
                [&](int i, int to) {
                  const int key = i * C::kSliceRows;
                  load_slice<C>(head + key / kTileRows * form.tile_bytes() +
                                    key % kTileRows * static_cast<int>(kRowBytes),
                                params.num_panels(), layout.slice(to));
                },
                [&](int i, int from) {
                  const int key = i * C::kSliceRows;
                  if (key >= seen_by_strip) return;  // nothing but zeros
                  multiply_keys<C>(params, strip, limits, key, own, layout.slice(from), dq);
                });
}

template <class C>
CP_DEVICE void execute(const BackwardParams& params, const RowItem& item, const GradientOp& op,
                       const RowStrip& strip, const Layout<C>& layout, int& stage, Sums<C>& dq) {
  switch (op.kind) {
    case GradientOpKind::leaf:
      if (C::kFault != Fault::sums_not_reset) clear_sums(dq);
      add_leaf<C>(params, item, op, strip, layout, stage, dq);
      break;
    case GradientOpKind::continue_leaf:
      add_leaf<C>(params, item, op, strip, layout, stage, dq);
      break;
    case GradientOpKind::load:
    case GradientOpKind::add:
    case GradientOpKind::store:
    case GradientOpKind::finish:
      execute_on_dq(params, item, op, strip, dq);
      break;
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  const GradientImage& image = *params.image;
  const Layout<C> layout(params, memory);
  const std::int64_t num_items = std::int64_t{image.num_row_tiles} * params.num_heads;
  int stage = 0;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const RowItem item = row_item(params, i);
    const QueryForm form = params.query_form();
    const RowStrip strip = row_strip(params, item, warp_index() * kStripRows);
    __syncthreads();  // no warp reads the last item's queries
    load_own<C>(item.rows->packed + item.head * form.head_bytes(item.rows->num_rows) +
                    item.first / kTileRows * form.tile_bytes(),
                form.tile_bytes(), item.rows->num_rows - item.first, params.num_panels(),
                layout.own);
    Sums<C> dq;
    if (C::kFault == Fault::sums_not_reset) clear_sums(dq);
    for (std::int32_t place = item.rows->op_begin; place < item.rows->op_end; ++place) {
      execute<C>(params, item, image.part<GradientOp>(image.ops)[place], strip, layout, stage, dq);
    }
    ptx::wait_copies<0>();  // also where no row sees a key
  }
}

}  // namespace cpattn::cuda::sm80_gradient
