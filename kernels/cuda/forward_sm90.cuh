// The kernel of forward_sm90.h: a producer and two consumers, all warpgroups of a block that stays
// for the whole step of a ring.
//
// A consumer has 64 query rows of the item at hand. Scores and results are wgmma accumulators;
// weights go from one product to the other in registers. While the values of a step are multiplied,
// the scores of the next one become weights. Source: FlashAttention-3 (Shah et al. 2024).
#pragma once

#include "kernels/cuda/key_ring_sm90.h"
#include "kernels/cuda/scores.h"
#include "kernels/cuda/strip_in_place.h"

namespace cpattn::cuda::sm90 {

template <class C>
using Scores = float[C::kStepKeys / 8][4];
template <class C>
using Weights = std::uint32_t[C::kStepKeys / 16][4];

/// One of the consumers and where it is in the ring.
template <class C>
struct Consumer {
  using Plan = SharedPlan<C>;
  const ForwardParams& params;
  std::byte* memory;
  ptx::SharedAddress shared;
  int number = consumer_number();
  int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  RingPlace<C> keys = {};
  RingPlace<C> values = {};

  CP_DEVICE int first_row() const { return number * kGroupRows; }
  CP_DEVICE int warp_row() const { return thread / 32 * kStripRows; }

  CP_DEVICE void wait_for_keys() const {
    if (C::kFault == Fault::no_wait_for_full) return;
    ptx::mbarrier_wait(shared + Plan::full_keys(keys.stage), keys.parity);
  }
  CP_DEVICE void wait_for_values() const {
    ptx::mbarrier_wait(shared + Plan::full_values(values.stage), values.parity);
  }
  /// The warp has read what it needs.
  CP_DEVICE void release_keys() {
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::empty_keys(keys.stage));
    keys.advance();
  }
  CP_DEVICE void release_values() {
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::empty_values(values.stage));
    values.advance();
  }
};

/// The consumer's rows of q to shared memory; rows that do not exist are zero.
template <class C>
CP_DEVICE void load_queries(const Consumer<C>& me, const ForwardItem& item) {
  constexpr int kRowPieces = kPanelColumns / kPieceChannels;
  const PieceRows& q = me.params.q;
  constexpr int kPieces = C::kKeyPanels * kGroupRows * kRowPieces;
  std::byte* const to = me.memory + SharedPlan<C>::queries(me.number);
  const unsigned barrier = kGroupBarrier + static_cast<unsigned>(me.number);
  ptx::named_barrier_sync(barrier, kGroupThreads);  // the products with the last rows are done
  for (int i = me.thread; i < kPieces; i += kGroupThreads) {
    const int row = i / kRowPieces % kGroupRows, panel = i / kRowPieces / kGroupRows;
    const int channel = panel * kPanelColumns + i % kRowPieces * kPieceChannels;
    const int row_of_item = me.first_row() + row;
    Piece piece{};
    if (row_of_item < item.num_rows && channel < q.dim) {
      const std::int64_t at = item.program->row_begin + item.first_row + row_of_item;
      piece = scaled_query<typename C::T>(load_piece(q, at, item.head, channel), me.params.scale);
    }
    *reinterpret_cast<Piece*>(to + panel_offset(static_cast<std::uint32_t>(row),
                                                static_cast<std::uint32_t>(channel))) = piece;
  }
  ptx::fence_async_proxy();
  if (C::kFault != Fault::no_barrier_after_queries) {
    ptx::named_barrier_sync(barrier, kGroupThreads);
  }
}

/// s = q k for the keys at hand; columns of a tile that is not there hold anything.
template <class C>
CP_DEVICE void start_scores(const Consumer<C>& me, Scores<C>& s) {
  constexpr unsigned kStride =
      C::kFault == Fault::wrong_stride ? kEightRowsBytes / 2 : kEightRowsBytes;
  const ptx::SharedAddress q = me.shared + SharedPlan<C>::queries(me.number),
                           k = me.shared + SharedPlan<C>::keys(me.keys.stage);
  ptx::hold_registers(flat(s));
  ptx::products_fence();
  CP_UNROLL
  for (unsigned panel = 0; panel < C::kKeyPanels; ++panel) {
    CP_UNROLL
    for (unsigned step = 0; step < kPanelColumns / 16; ++step) {
      ptx::start_product<C::kStepKeys, false, false>(
          flat(s),
          ptx::matrix_descriptor(q + panel * kPanelBytes + 32 * step, 0, kEightRowsBytes,
                                 Swizzle::bytes128),
          ptx::matrix_descriptor(k + panel * C::kStepPanelBytes + 32 * step, 0, kStride,
                                 Swizzle::bytes128),
          panel > 0 || step > 0, typename C::T{});
    }
  }
  ptx::commit_products();
}

/// o += p v for the first kNumTiles tiles of the values at hand.
template <class C, int kNumTiles>
CP_DEVICE void start_values(const Consumer<C>& me, Weights<C>& p, Accumulator<C::kPanels>& acc) {
  const ptx::SharedAddress v = me.shared + SharedPlan<C>::values(me.values.stage);
  ptx::hold_registers(flat(acc.o));
  ptx::products_fence();
  CP_UNROLL
  for (int step = 0; step < kNumTiles * kTileRows / 16; ++step) {
    const std::uint32_t first = static_cast<std::uint32_t>(step) * 2 * kEightRowsBytes;
    ptx::start_product<kPanelColumns * C::kPanels, true>(
        flat(acc.o), p[step],
        ptx::matrix_descriptor(v + first, C::kStepPanelBytes, kEightRowsBytes, Swizzle::bytes128),
        true, typename C::T{});
  }
  ptx::commit_products();
}

/// The result of start_values is there, and p is free.
template <class C>
CP_DEVICE void finish_values(Weights<C>& p, Accumulator<C::kPanels>& acc) {
  ptx::wait_products<0>();
  ptx::hold_registers(flat(acc.o));
  CP_UNROLL
  for (int step = 0; step < C::kStepKeys / 16; ++step) ptx::hold_registers(p[step]);
}

/// Behind all keys.
inline constexpr std::int32_t kNoKey = 1 << 30;

/// Takes values that are not finite out of the stage where some row of the item does not see all of
/// its keys: 0 times NaN is not 0. Whether there are any; first_special() then says where. Both
/// consumers call it for every step, before either multiplies.
template <class C>
CP_DEVICE bool guard_values(const Consumer<C>& me, const KeyWalk& walk, int step) {
  const int end = (step + 1) * C::kStepKeys;
  if (walk.first_limit >= (end < walk.num_keys ? end : walk.num_keys) ||
      C::kFault == Fault::hidden_values_as_numbers) {
    return false;
  }
  using T = typename C::T;
  const int tiles_left = walk.num_tiles - step * C::kStepTiles;
  const int num_rows = (tiles_left < C::kStepTiles ? tiles_left : C::kStepTiles) * kTileRows;
  const int thread = static_cast<int>(threadIdx.x) - kGroupThreads;  // of both consumers
  std::byte* const values = me.memory + SharedPlan<C>::values(me.values.stage);
  auto* const findings = reinterpret_cast<std::uint32_t*>(me.memory + SharedPlan<C>::kFindings);

  constexpr int kRowPieces = kPanelColumns / kPieceChannels;
  std::uint32_t found = 0;
  for (int panel = 0; panel < me.params.form.v_panels; ++panel) {
    const auto* pieces = reinterpret_cast<const Piece*>(values + static_cast<std::uint32_t>(panel) *
                                                                     C::kStepPanelBytes);
    for (int i = thread; i < num_rows * kRowPieces; i += kConsumerThreads) {
      for (const std::uint32_t word : pieces[i].word) found |= special_halves<T>(word);
    }
  }
  findings[thread] = found;
  ptx::named_barrier_sync(kConsumersBarrier, kConsumerThreads);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kConsumerThreads; i += 32) {
    found |= findings[i];
  }
  const bool is_found = __any_sync(kAllLanes, found != 0) != 0;
  if (is_found && thread < me.params.form.v_panels * kPanelColumns) {
    auto* const first = reinterpret_cast<std::int32_t*>(me.memory + SharedPlan<C>::kFirstSpecial);
    std::byte* const panel =
        values + static_cast<std::uint32_t>(thread / kPanelColumns) * C::kStepPanelBytes;
    first[thread] = kNoKey;
    for (int row = num_rows - 1; row >= 0; --row) {
      auto& value = *reinterpret_cast<HalfWord*>(
          panel + panel_offset(static_cast<std::uint32_t>(row),
                               static_cast<std::uint32_t>(thread % kPanelColumns)));
      if (special_halves<T>(value.bits) == 0) continue;
      value.bits = 0;
      first[thread] = row;
    }
    ptx::fence_async_proxy();
  }
  ptx::named_barrier_sync(kConsumersBarrier, kConsumerThreads);
  return is_found;
}

/// o becomes NaN where a row sees a key whose value was taken out. `visible`: of the warp's rows.
template <class C>
CP_DEVICE void mark_special_values(const Consumer<C>& me, const Visible& visible,
                                   Accumulator<C::kPanels>& acc) {
  const StripLane lane;
  const auto* first =
      reinterpret_cast<const std::int32_t*>(me.memory + SharedPlan<C>::kFirstSpecial);
  CP_UNROLL
  for (int n = 0; n < Accumulator<C::kPanels>::kColumnTiles; ++n) {
    const int channel = 8 * n + lane.channel;
    if (channel >= me.params.form.v_panels * kPanelColumns) break;
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (first[channel + i % 2] < visible.of_row(lane.row + i / 2 * 8)) acc.o[n][i] = NAN;
    }
  }
}

/// Scores to rounded weights; what becomes of o is in alpha. `visible`: of the warp's rows.
template <class C>
CP_DEVICE void weigh(const Consumer<C>& me, const Visible& visible, Scores<C>& s,
                     Accumulator<C::kPanels>& acc, float (&alpha)[2]) {
  if (visible.of_all() < C::kStepKeys) hide_keys(visible, s);
  weigh_keys(me.params.scale.multiplier, acc, s, alpha);
}

template <class C>
CP_DEVICE void apply(const Scores<C>& s, const float (&alpha)[2], Accumulator<C::kPanels>& acc,
                     Weights<C>& p) {
  rescale(acc, alpha);
  CP_UNROLL
  for (int step = 0; step < C::kStepKeys / 16; ++step) {
    round_weights<typename C::T>(s, step, p[step]);
  }
}

/// The accumulator goes on over one block of keys.
template <class C>
CP_DEVICE void attend(Consumer<C>& me, const ForwardItem& item, const TileOp& op,
                      Accumulator<C::kPanels>& acc) {
  const KeyWalk walk = key_walk(me.params, item, op);
  const int num_steps = walk.num_steps<C>();
  // Of rows [row, row + 16) or 64 of the item, at a step.
  const auto visible = [&](int row, int step) {
    return Visible{walk.first_limit + row - step * C::kStepKeys,
                   walk.num_keys - step * C::kStepKeys, item.num_rows - row};
  };
  const auto of_warp = [&](int step) { return visible(me.first_row() + me.warp_row(), step); };
  // Steps that none of the group's rows sees would change no bit.
  const int seen_keys = visible(me.first_row(), 0).of_any();
  const int my_steps = seen_keys > 0 ? (seen_keys + C::kStepKeys - 1) / C::kStepKeys : 0;
  share_sums(acc);
  if (my_steps > 0) {
    Scores<C> s;
    Weights<C> p;
    float alpha[2];
    me.wait_for_keys();
    start_scores<C>(me, s);
    ptx::wait_products<0>();
    ptx::hold_registers(flat(s));
    me.release_keys();
    weigh<C>(me, of_warp(0), s, acc, alpha);
    apply<C>(s, alpha, acc, p);
    for (int step = 1; step < my_steps; ++step) {
      me.wait_for_keys();
      start_scores<C>(me, s);
      me.wait_for_values();
      const bool has_special = guard_values(me, walk, step - 1);
      start_values<C, C::kStepTiles>(me, p, acc);
      ptx::wait_products<1>();
      ptx::hold_registers(flat(s));
      me.release_keys();
      weigh<C>(me, of_warp(step), s, acc, alpha);
      finish_values<C>(p, acc);
      me.release_values();
      if (has_special) mark_special_values(me, of_warp(step - 1), acc);
      apply<C>(s, alpha, acc, p);
    }
    me.wait_for_values();
    const bool has_special = guard_values(me, walk, my_steps - 1);
    if (seen_keys - (my_steps - 1) * C::kStepKeys <= kTileRows) {
      start_values<C, 1>(me, p, acc);
    } else {
      start_values<C, C::kStepTiles>(me, p, acc);
    }
    finish_values<C>(p, acc);
    me.release_values();
    if (has_special) mark_special_values(me, of_warp(my_steps - 1), acc);
  }
  // One lane says for its warp that a stage is free. Where products do not bring the lanes together
  // before that, a lane might still wait for a phase that is then over, and for its next likeness.
  const auto gather = [] {
    if (C::kFault != Fault::no_gathering) __syncwarp();
  };
  for (int step = my_steps; step < num_steps; ++step) {
    me.wait_for_keys();
    gather();
    me.release_keys();
    me.wait_for_values();
    guard_values(me, walk, step);
    gather();
    me.release_values();
  }
  add_shares(acc);
}

template <class C>
CP_DEVICE void consume(Consumer<C>& me) {
  const ForwardParams& params = me.params;
  const StepImage& image = *params.image;
  const int num_items = image.num_tiles * params.num_heads;
  for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
    const ForwardItem item = forward_item(params, i, kRowTile);
    load_queries(me, item);
    Accumulator<C::kPanels> acc;
    for (std::int32_t at = item.program->op_begin; at < item.program->op_end; ++at) {
      const TileOp op = image.part<TileOp>(image.ops)[at];
      if (op.kind == TileOpKind::block) clear(acc);
      if (op.kind == TileOpKind::block || op.kind == TileOpKind::accumulate) {
        attend(me, item, op, acc);
      } else {
        in_place::execute(params, item, op, me.first_row() + me.warp_row(), acc);
      }
    }
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  const ptx::SharedAddress shared = ptx::shared_address(memory);
  clear_surplus_keys<C>(params.form, memory);
  if (threadIdx.x == 0) init_barriers<C>(shared);
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::decrease_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(params, shared);
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    Consumer<C> me{.params = params, .memory = memory, .shared = shared};
    consume(me);
  }
}

}  // namespace cpattn::cuda::sm90
