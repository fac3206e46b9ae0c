// What the two kernels of backward_sm90.h share: a consumer, its products, and how numbers that are
// not finite are kept from those who do not see them.
//
// Own rows times the rows of a tile are two products, scores and dots of dout and v (or their
// transposes), as accumulators; what is made of them, rounded, goes in registers to the products
// with the tile's rows. Source: FlashAttention-3 (Shah et al. 2024).
#pragma once

#include "kernels/cuda/backward_ring_sm90.h"
#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/gradient_strips.h"

namespace cpattn::cuda::sm90_gradient {

/// Own rows of a consumer times rows of a tile.
using Scores = float[kTileRows / 8][4];
/// The same rounded, as left operands of products over the tile's rows.
using Weights = std::uint32_t[kTileRows / 16][4];
/// Sums of the own rows.
template <class C>
using Sums = float[8 * C::kPanels][4];

/// One of the consumers and where it is in the ring.
template <class C>
struct Consumer {
  using Plan = SharedPlan<C>;
  const BackwardParams& params;
  std::byte* memory;
  ptx::SharedAddress shared;
  int number = sm90::consumer_number();
  int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  RingPlace<C> place = {};
  unsigned own_parity = 0;

  /// The first of the group's rows, and of the warp's, within the item.
  CP_DEVICE int group_row() const { return number * kGroupRows; }
  CP_DEVICE int warp_row() const { return group_row() + thread / 32 * kStripRows; }

  CP_DEVICE void wait_for_own() {
    if (C::kFault != Fault::no_wait_for_own) {
      ptx::mbarrier_wait(shared + Plan::full_own(), own_parity);
    }
    own_parity ^= 1u;
  }
  CP_DEVICE void wait_for_tile() const {
    if (C::kFault == Fault::no_wait_for_full) return;
    ptx::mbarrier_wait(shared + Plan::full(place.stage), place.parity);
  }
  CP_DEVICE void release_own() const {
    __syncwarp();  // no lane waits for the own tiles any more, also where no tile passed by
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::empty_own());
  }
  /// The warp has read what it needs: lanes read lse and delta by themselves, and one lane says so
  /// for all.
  CP_DEVICE void release_tile() {
    if (C::kFault != Fault::no_sync_before_release) __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Plan::empty(place.stage));
    place.advance();
  }

  CP_DEVICE ptx::SharedAddress own_first() const { return shared + Plan::own(number); }
  CP_DEVICE ptx::SharedAddress own_second() const { return own_first() + Plan::kHalfBytes; }
  CP_DEVICE ptx::SharedAddress tile_first() const { return shared + Plan::stage(place.stage); }
  CP_DEVICE ptx::SharedAddress tile_second() const { return tile_first() + Plan::kHalfBytes; }
  /// lse and delta of rows `row` and the next one of the tile.
  CP_DEVICE FloatPair lse(int row) const { return scalar_pair(row); }
  CP_DEVICE FloatPair delta(int row) const {
    if (C::kFault == Fault::delta_ignored) return {};
    return scalar_pair(kTileRows + row);
  }

 private:
  CP_DEVICE FloatPair scalar_pair(int index) const {
    return *reinterpret_cast<const FloatPair*>(memory + Plan::scalars(place.stage) + 4 * index);
  }
};

/// x = own rows times the tile's rows, transposed.
template <class C>
CP_DEVICE void start_scores(ptx::SharedAddress own, ptx::SharedAddress tile, Scores& x) {
  constexpr unsigned kStride =
      C::kFault == Fault::wrong_stride ? sm90::kEightRowsBytes / 2 : sm90::kEightRowsBytes;
  ptx::hold_registers(sm90::flat(x));
  if (C::kFault != Fault::no_fence_before_products) ptx::products_fence();
  CP_UNROLL
  for (unsigned panel = 0; panel < C::kPanels; ++panel) {
    CP_UNROLL
    for (unsigned step = 0; step < kPanelColumns / 16; ++step) {
      const unsigned at = panel * kPanelBytes + 32 * step;
      ptx::start_product<kTileRows, false, false>(
          sm90::flat(x),
          ptx::matrix_descriptor(own + at, 0, sm90::kEightRowsBytes, Swizzle::bytes128),
          ptx::matrix_descriptor(tile + at, 0, kStride, Swizzle::bytes128), panel > 0 || step > 0,
          typename C::T{});
    }
  }
  ptx::commit_products();
}

/// sums += w times the tile's rows.
template <class C>
CP_DEVICE void start_sums(ptx::SharedAddress tile, Weights& w, Sums<C>& sums) {
  ptx::hold_registers(sm90::flat(sums));
  ptx::products_fence();
  CP_UNROLL
  for (int step = 0; step < kTileRows / 16; ++step) {
    const std::uint32_t first = static_cast<std::uint32_t>(step) * 2 * sm90::kEightRowsBytes;
    ptx::start_product<kPanelColumns * C::kPanels, true>(
        sm90::flat(sums), w[step],
        ptx::matrix_descriptor(tile + first, kPanelBytes, sm90::kEightRowsBytes, Swizzle::bytes128),
        true, typename C::T{});
  }
  ptx::commit_products();
}

/// After the wait for a product: its result is there, and its left operand is free.
template <int kCount>
CP_DEVICE void hold(float (&x)[kCount][4]) {
  ptx::hold_registers(sm90::flat(x));
}
CP_DEVICE void hold(Weights& w) {
  CP_UNROLL
  for (int step = 0; step < kTileRows / 16; ++step) ptx::hold_registers(w[step]);
}

template <class T>
CP_DEVICE void round_scores(const Scores& x, Weights& w) {
  CP_UNROLL
  for (int step = 0; step < kTileRows / 16; ++step) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float(&pair)[4] = x[2 * step + i / 2];
      w[step][i] = ptx::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1], T{});
    }
  }
}

/// Of the special numbers of a channel, the one that whoever sees any of them sees: rows see the
/// first keys of a tile, keys are seen by its last rows.
enum class Decisive { first, last };

/// No row of a tile: lies behind all keys and rows.
inline constexpr int kNowhere = 1 << 30;

/// Takes numbers that are not finite out of the first kNumPanels panels of the tile at hand: 0
/// times NaN is not 0. Whether there are any; decisive_rows() then says where. Both consumers call
/// it for the same tiles, after their products with own rows and before those with weights.
template <class C, Decisive kDecisive, int kNumPanels>
CP_DEVICE bool take_specials_out(const Consumer<C>& me) {
  using Plan = SharedPlan<C>;
  using T = typename C::T;
  static_assert(kNumPanels * kPanelColumns <= kConsumerThreads, "a thread has one channel");
  if (C::kFault == Fault::hidden_specials_multiplied) return false;
  const int thread = static_cast<int>(threadIdx.x) - kGroupThreads;  // of both consumers
  std::byte* const tile = me.memory + Plan::stage(me.place.stage);
  auto* const findings = reinterpret_cast<std::uint32_t*>(me.memory + Plan::kFindings);

  std::uint32_t found = 0;
  CP_UNROLL_BY(1)
  for (int i = thread; i < kNumPanels * (kPanelBytes / 16); i += kConsumerThreads) {
    for (const std::uint32_t word : reinterpret_cast<const Piece*>(tile)[i].word) {
      found |= special_halves<T>(word);
    }
  }
  findings[thread] = found;
  if (C::kFault != Fault::no_barrier_before_zeros) {
    ptx::named_barrier_sync(sm90::kConsumersBarrier, kConsumerThreads);
  }
  CP_UNROLL_BY(1)
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kConsumerThreads; i += 32) {
    found |= findings[i];
  }
  const bool is_found = __any_sync(0xffffffffu, found != 0) != 0;
  if (is_found && thread < kNumPanels * kPanelColumns) {
    auto* const decisive = reinterpret_cast<std::int32_t*>(me.memory + Plan::kDecisive);
    int row_found = kNowhere;
    CP_UNROLL_BY(1)
    for (int row = 0; row < kTileRows; ++row) {
      auto& number = *reinterpret_cast<HalfWord*>(
          tile + panel_offset(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(thread)));
      if (special_halves<T>(number.bits) == 0) continue;
      number.bits = 0;
      if (kDecisive == Decisive::last || row_found == kNowhere) row_found = row;
    }
    decisive[thread] = row_found;
    ptx::fence_async_proxy();
  }
  ptx::named_barrier_sync(sm90::kConsumersBarrier, kConsumerThreads);
  return is_found;
}

/// Sums become NaN where an own row sees a number that was taken out. `sees(row, k)`: whether row 0
/// to 15 of the warp's strip sees row k of the tile. `first_channel`: of the sums in the tile.
template <class C, class Sees>
CP_DEVICE void mark_specials(const Consumer<C>& me, int first_channel, const Sees& sees,
                             Sums<C>& sums) {
  const StripLane lane;
  const auto* decisive =
      reinterpret_cast<const std::int32_t*>(me.memory + SharedPlan<C>::kDecisive) + first_channel;
  CP_UNROLL
  for (int n = 0; n < 8 * C::kPanels; ++n) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int k = decisive[8 * n + lane.channel + i % 2];
      if (k != kNowhere && sees(lane.row + i / 2 * 8, k)) sums[n][i] = NAN;
    }
  }
}

/// The frame of both kernels: `produce(producer)` and `consume(consumer)` walk all items.
template <class C, class Produce, class Consume>
CP_DEVICE void run_warpgroups(const BackwardParams& params, std::byte* memory,
                              const Produce& produce, const Consume& consume) {
  const ptx::SharedAddress shared = ptx::shared_address(memory);
  clear_surplus_panels<C>(params, memory);
  if (threadIdx.x == 0) init_barriers<C>(shared);
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::decrease_registers<sm90::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<C> producer{.params = params, .shared = shared};
      produce(producer);
    }
  } else {
    ptx::increase_registers<sm90::kConsumerRegisters>();
    Consumer<C> consumer{.params = params, .memory = memory, .shared = shared};
    consume(consumer);
  }
}

}  // namespace cpattn::cuda::sm90_gradient
