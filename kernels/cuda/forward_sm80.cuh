// The kernel of forward_sm80.h.
//
// A thread block of four warps does one row tile of one head at a time; a warp owns one or two
// strips of 16 rows and shares nothing with the others but q, k and v in shared memory. Half tiles
// (the keys of a tile, then its values) pass through a ring of slots: while one is multiplied,
// cp.async fills the others. Source: FlashAttention-2 (Dao 2023), algorithm 1.
#pragma once

#include "kernels/cuda/forward_tiles.cuh"

namespace cpattn::cuda::sm80 {

/// Keys of the tile at hand that the warp's rows see: row i of the warp sees [0, first + i), at
/// most `num_keys`.
struct Visible {
  int first = 0;     ///< may be negative, or beyond the tile
  int num_keys = 0;  ///< of the block from this tile on
  int num_rows = 0;  ///< of the warp that exist

  CP_DEVICE int of_row(int row) const { return first + row < num_keys ? first + row : num_keys; }
  /// That any row sees; 0 for a warp without rows.
  CP_DEVICE int of_any() const { return num_rows > 0 ? of_row(num_rows - 1) : 0; }
  CP_DEVICE int of_all() const { return of_row(0); }
};

/// Scores of the warp's strips: as accumulators, key 8 n + 2 t and the next one.
template <class C>
using Scores = float[C::kStrips][kTileRows / 8][4];

template <class C>
CP_DEVICE void multiply_keys(const ForwardParams& params, ptx::SharedAddress q,
                             ptx::SharedAddress k, Scores<C>& s) {
  const SquareLane q_lane(false), k_lane(true);
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      CP_UNROLL
      for (int i = 0; i < 4; ++i) s[strip][n][i] = 0.0f;
    }
  }
  const int num_steps = (params.q.dim + 15) / 16;
  CP_UNROLL_BY(1)
  for (int step = 0; step < num_steps; ++step) {
    const auto panel = static_cast<std::uint32_t>(step / 4),
               within = static_cast<std::uint32_t>(step % 4);
    std::uint32_t a[C::kStrips][4];
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) {
      ptx::load_matrices(a[strip], q + panel * C::kTileRows * kRowBytes +
                                       static_cast<std::uint32_t>(strip) * kStripRows * kRowBytes +
                                       q_lane(within));
    }
    CP_UNROLL
    for (int pair = 0; pair < kTileRows / 16; ++pair) {
      std::uint32_t b[4];
      ptx::load_matrices(b, k + panel * kPanelBytes +
                                static_cast<std::uint32_t>(pair) * 16 * kRowBytes + k_lane(within));
      CP_UNROLL
      for (int strip = 0; strip < C::kStrips; ++strip) {
        ptx::multiply(s[strip][2 * pair], a[strip], b[0], b[1], typename C::T{});
        ptx::multiply(s[strip][2 * pair + 1], a[strip], b[2], b[3], typename C::T{});
      }
    }
  }
}

template <class C>
CP_DEVICE void hide_keys(const Visible& visible, Scores<C>& s) {
  const StripLane lane;
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int limit = visible.of_row(strip * kStripRows + lane.row + i / 2 * 8) +
                        (C::kFault == Fault::limit_one_too_many ? 1 : 0);
      CP_UNROLL
      for (int n = 0; n < kTileRows / 8; ++n) {
        if (8 * n + lane.channel + i % 2 >= limit) s[strip][n][i] = -INFINITY;
      }
    }
  }
}

/// Weights of the warp's strips, rounded: of row g or g + 8, keys 8 n + 2 t and the next one. A
/// product takes them as they lie.
template <class C>
using Weights = std::uint32_t[C::kStrips][kTileRows / 8][2];

/// Weights 2^(s scale - m) of a strip's scores, and the state to the new maximum. l is the lane's
/// share, of unrounded weights.
template <class C>
CP_DEVICE void weigh_keys(float scale, const float (&s)[kTileRows / 8][4],
                          Accumulator<C::kPanels>& a, std::uint32_t (&p)[kTileRows / 8][2]) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    float best = -INFINITY;
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      best = fmaxf(best, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
    const float m = fmaxf(a.m[half], best * scale);
    // A row that has seen nothing yet keeps m = -inf; its weights are taken against 0, so they are
    // 0.
    const float safe_m = -INFINITY < m ? m : 0.0f;
    const float alpha = ptx::exp2_approximate(a.m[half] - safe_m);
    a.m[half] = m;
    float sum = 0.0f;
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      const float first = ptx::exp2_approximate(fmaf(s[n][2 * half], scale, -safe_m));
      const float second = ptx::exp2_approximate(fmaf(s[n][2 * half + 1], scale, -safe_m));
      sum += first;
      sum += second;
      p[n][half] = ptx::pack(first, second, typename C::T{});
    }
    a.l[half] = fmaf(a.l[half], alpha, sum);
    CP_UNROLL
    for (int n = 0; n < Accumulator<C::kPanels>::kColumnTiles; ++n) {
      a.o[n][2 * half] *= alpha;
      a.o[n][2 * half + 1] *= alpha;
    }
  }
}

/// Rows of a 16x16 square of P as 1 where the row sees the key, else 0. `seen(row)`: how many.
template <class T, class Seen>
CP_DEVICE void mark_visible(const Seen& seen, std::uint32_t (&a)[4]) {
  const StripLane lane;
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int key = lane.channel + i / 2 * 8, limit = seen(lane.row + i % 2 * 8);
    a[i] = ptx::pack(key < limit ? 1.0f : 0.0f, key + 1 < limit ? 1.0f : 0.0f, T{});
  }
}

/// o becomes NaN where a row sees a key whose value is not finite: `special` has ones there.
template <class T>
CP_DEVICE void add_special_values(const std::uint32_t (&marks)[4], std::uint32_t special0,
                                  std::uint32_t special1, float (&o)[4]) {
  float seen[4] = {};
  ptx::multiply(seen, marks, special0, special1, T{});
  CP_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = seen[i] > 0.0f ? NAN : o[i];
}

/// o += P V for keys [16 step, 16 step + 16). kIsPartial: some rows do not see some of the keys,
/// and 0 times NaN is not 0, so values that are not finite are taken out of the product.
template <class C, bool kIsPartial>
CP_DEVICE void multiply_value_step(const KvForm& form, const Visible& visible, int step,
                                   ptx::SharedAddress v, const Weights<C>& weights,
                                   Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  using T = typename C::T;
  const SquareLane v_lane(false);
  std::uint32_t p[C::kStrips][4];
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) p[strip][i] = weights[strip][2 * step + i / 2][i % 2];
  }
  CP_UNROLL
  for (int n = 0; n < 4 * C::kPanels; ++n) {
    if (n / 4 >= form.v_panels) break;
    std::uint32_t b[4];
    ptx::load_transposed(b, v + static_cast<std::uint32_t>(n / 4 * kPanelBytes) +
                                static_cast<std::uint32_t>(step) * 16 * kRowBytes +
                                v_lane(static_cast<std::uint32_t>(n % 4)));
    if (kIsPartial) {
      std::uint32_t special[4];
      CP_UNROLL
      for (int i = 0; i < 4; ++i) {
        special[i] = special_halves<T>(b[i]);
        b[i] &= ~special[i];
        special[i] &= kOnes<T>;
      }
      if (__any_sync(kAllLanes, (special[0] | special[1] | special[2] | special[3]) != 0) != 0) {
        CP_UNROLL
        for (int strip = 0; strip < C::kStrips; ++strip) {
          std::uint32_t marks[4];
          mark_visible<T>(
              [&](int row) { return visible.of_row(strip * kStripRows + row) - 16 * step; }, marks);
          add_special_values<T>(marks, special[0], special[1], acc[strip].o[2 * n]);
          add_special_values<T>(marks, special[2], special[3], acc[strip].o[2 * n + 1]);
        }
      }
    }
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) {
      ptx::multiply(acc[strip].o[2 * n], p[strip], b[0], b[1], T{});
      ptx::multiply(acc[strip].o[2 * n + 1], p[strip], b[2], b[3], T{});
    }
  }
}

template <class C>
CP_DEVICE void multiply_values(const KvForm& form, const Visible& visible, ptx::SharedAddress v,
                               const Weights<C>& p, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  CP_UNROLL
  for (int step = 0; step < kTileRows / 16; ++step) {
    if (16 * step >= visible.of_any()) break;
    if (C::kFault == Fault::hidden_values_as_numbers || 16 * (step + 1) <= visible.of_all()) {
      multiply_value_step<C, false>(form, visible, step, v, p, acc);
    } else {
      multiply_value_step<C, true>(form, visible, step, v, p, acc);
    }
  }
}

/// The tile's row with which the warp's begin.
template <class C>
CP_DEVICE int warp_row() {
  return static_cast<int>(ptx::thread() / 32) * C::kStrips * kStripRows;
}

/// The accumulators go on over one block of keys. Called by all threads of the block.
template <class C>
CP_DEVICE void attend(const ForwardParams& params, const ForwardItem& item, const TileOp& op,
                      ptx::SharedAddress shared, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  const StepImage& image = *params.image;
  const KeyBlock block = image.part<KeyBlock>(image.kv_blocks)[op.kv_block];
  const auto num_keys = static_cast<int>(block.num_keys);
  const int first_limit = op.first_row_limit + item.first_row;  // keys that the tile's row 0 sees
  const int last_limit = first_limit + item.num_rows - 1;
  const int seen_keys = last_limit < num_keys ? last_limit : num_keys;
  const int num_tiles = seen_keys > 0 ? (seen_keys + kTileRows - 1) / kTileRows : 0;
  const int row = warp_row<C>();
  const ptx::SharedAddress q = shared + static_cast<std::uint32_t>(row) * kRowBytes;
  const ptx::SharedAddress first_slot = shared + query_bytes<C>(params.form);
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      // Until the block's end l is in shares: what came before is the first lane's.
      if (ptx::thread() % 4 != 0) acc[strip].l[half] = 0.0f;
    }
  }
  Visible visible{first_limit + row, num_keys, item.num_rows - row};
  Ring<C> ring(block.packed + item.head / params.group_size * params.form.head_bytes(num_keys),
               num_tiles, first_slot);
  __syncthreads();  // q is there, and no warp reads the last block's values
  CP_UNROLL
  for (int i = 0; i < C::kSlots - 1; ++i) ring.ask(params, first_slot);
  CP_UNROLL_BY(1)
  for (int tile = 0; tile < num_tiles; ++tile) {
    const bool sees_any = visible.of_any() > 0;  // a tile that no row sees would change no bit
    Weights<C> p;
    ring.arrive(params, first_slot);
    if (sees_any) {
      Scores<C> s;
      multiply_keys<C>(params, q, ring.here, s);
      if (visible.of_all() < kTileRows) hide_keys<C>(visible, s);
      CP_UNROLL
      for (int strip = 0; strip < C::kStrips; ++strip) {
        weigh_keys<C>(params.scale.multiplier, s[strip], acc[strip], p[strip]);
      }
    }
    ring.leave(params, first_slot);
    ring.arrive(params, first_slot);
    if (sees_any) multiply_values<C>(params.form, visible, ring.here, p, acc);
    ring.leave(params, first_slot);
    visible.first -= kTileRows;
    visible.num_keys -= kTileRows;
  }
  ptx::wait_copies<0>();
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      float& l = acc[strip].l[half];
      l += __shfl_xor_sync(kAllLanes, l, 1);
      l += __shfl_xor_sync(kAllLanes, l, 2);
    }
  }
}

/// Between blocks of keys the ring's memory is the warps' stages: it has at least two slots.
template <class C>
CP_DEVICE Stage stage_of_warp(const ForwardParams& params, std::byte* memory) {
  static_assert(kWarps * stage_bytes(1) == 2 * kPanelBytes);
  const int warp = static_cast<int>(ptx::thread() / 32);
  return {reinterpret_cast<float*>(memory + query_bytes<C>(params.form) +
                                   warp * stage_bytes(params.form.v_panels)),
          kPanelColumns * params.form.v_panels};
}

template <class C>
CP_DEVICE void execute(const ForwardParams& params, const ForwardItem& item, const TileOp& op,
                       std::byte* memory, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  if (op.kind == TileOpKind::block) {
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) clear(acc[strip]);
  }
  if (op.kind == TileOpKind::block || op.kind == TileOpKind::accumulate) {
    attend<C>(params, item, op, ptx::shared_address(memory), acc);
    return;
  }
  const Stage stage = stage_of_warp<C>(params, memory);
  __syncthreads();  // the stages lie where the last block's values were
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    const int row = warp_row<C>() + strip * kStripRows;
    switch (op.kind) {
      case TileOpKind::block:
      case TileOpKind::accumulate:
        break;
      case TileOpKind::load:
        load_states(acc[strip], strip_of_slot(params, item, op.slot, row), stage);
        break;
      case TileOpKind::merge_left:
      case TileOpKind::merge_right:
        merge_states(acc[strip], strip_of_slot(params, item, op.slot, row),
                     op.kind == TileOpKind::merge_left ? SlotSide::left : SlotSide::right, stage);
        break;
      case TileOpKind::store:
        store_states(acc[strip], strip_of_slot(params, item, op.slot, row), stage);
        break;
      case TileOpKind::finalize:
      case TileOpKind::finalize_empty: {
        if (op.kind == TileOpKind::finalize_empty) clear(acc[strip]);
        const StripOfResult result = strip_of_result(params, item, row);
        if (params.head_maxima != nullptr) {
          const float largest = largest_logit(acc[strip], result.num_rows);
          if (ptx::thread() % 32 == 0) raise_maximum(params.head_maxima + item.head, largest);
        }
        finalize_states(acc[strip], result, stage);
        break;
      }
    }
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  const StepImage& image = *params.image;
  Accumulator<C::kPanels> acc[C::kStrips];
  // What is at hand is looked up again for each op rather than kept in registers.
  const auto item_at = [&params](int i) { return forward_item(params, i, C::kTileRows); };
  CP_UNROLL_BY(1)
  for (int i = static_cast<int>(blockIdx.x); i < image.num_tiles * params.num_heads;
       i += static_cast<int>(gridDim.x)) {
    load_queries<C>(params, item_at(i), memory);
    CP_UNROLL_BY(1)
    for (int place = 0; place < item_at(i).program->num_ops(); ++place) {
      const ForwardItem item = item_at(i);
      execute<C>(params, item, image.part<TileOp>(image.ops)[item.program->op_begin + place],
                 memory, acc);
    }
  }
}

template <class C>
std::size_t shared_bytes(const KvForm& form) {
  return query_bytes<C>(form) + std::size_t{C::kSlots} * slot_bytes(form);
}

}  // namespace cpattn::cuda::sm80
