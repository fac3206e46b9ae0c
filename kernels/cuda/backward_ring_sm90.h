// How rows reach the warpgroups of the Hopper backward: the plan of shared memory, the ring of
// stages with its mbarriers, and what the producer, one thread, puts there.
//
// A thread block *owns* up to 128 rows, 64 for each consumer, which stay for a whole item; the
// *others* pass by in packed tiles of 64 rows. Either kind is q and dout, or k and v: a packed tile
// is *first* panels (q, k), then *second* panels (dout, v), then, of queries, lse and delta.
// Producer and consumers derive the same tiles from the same image; nothing but the barriers passes
// between them.
#pragma once

#include "kernels/cuda/backward_launch_sm90.h"
#include "kernels/cuda/pieces.h"
#include "kernels/cuda/warpgroups_sm90.h"

namespace cpattn::cuda::sm90_gradient {

using sm90::kConsumers;
using sm90::kConsumerThreads;
using sm90::kConsumerWarps;
using sm90::kGroupRows;
using sm90::kGroupThreads;
using sm90::kThreads;
using sm90::RingPlace;

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  wrong_byte_count,
  no_wait_for_full,
  no_wait_for_empty,
  no_wait_for_own,
  own_replaced_early,
  wrong_stride,
  no_barrier_before_zeros,
  no_fence_before_products,
  no_sync_before_release,
  hidden_specials_multiplied,
  sums_not_reset,
  delta_ignored,
};

static_assert(kOwnRows == sm90::kRowTile);
static_assert(kGroupRows == kTileRows, "a consumer owns a packed tile");

/// Head sizes of up to 64 kPanels channels, of either kind. Panels that a problem does not have are
/// zero from the beginning, since wgmma bears no loops that the compiler cannot unroll.
template <class T_, int kPanels_, Fault kFault_ = Fault::none>
struct Config {
  using T = T_;
  static constexpr int kPanels = kPanels_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kStages = 2;
};

template <class T, int kPanels>
using SoundConfig = Config<T, kPanels>;

/// Shared memory: the own tile of either consumer, the stages, their scalars, barriers, and what
/// take_specials_out leaves.
template <class C>
struct SharedPlan {
  static constexpr std::uint32_t kHalfBytes = C::kPanels * kPanelBytes;  ///< first panels
  static constexpr std::uint32_t kTileBytes = 2 * kHalfBytes;
  static constexpr std::uint32_t kScalarBytes = 2 * kTileRows * 4;
  static constexpr std::uint32_t kStages = kConsumers * kTileBytes;
  static constexpr std::uint32_t kScalars = kStages + C::kStages * kTileBytes;
  static constexpr std::uint32_t kBarriers = kScalars + C::kStages * kScalarBytes;
  /// A word of each consumer thread: whether it has found special numbers.
  static constexpr std::uint32_t kFindings = kBarriers + 8 * (2 * C::kStages + 2);
  /// For each channel of a tile the row whose special number decides.
  static constexpr std::uint32_t kDecisive = kFindings + 4 * kConsumerThreads;
  static constexpr std::uint32_t kBytes = kDecisive + 4 * 2 * kPanelColumns * C::kPanels;

  static CP_DEVICE std::uint32_t own(int consumer) {
    return static_cast<std::uint32_t>(consumer) * kTileBytes;
  }
  static CP_DEVICE std::uint32_t stage(int index) {
    return kStages + static_cast<std::uint32_t>(index) * kTileBytes;
  }
  static CP_DEVICE std::uint32_t scalars(int index) {
    return kScalars + static_cast<std::uint32_t>(index) * kScalarBytes;
  }
  static CP_DEVICE std::uint32_t full(int index) { return barrier(index); }
  static CP_DEVICE std::uint32_t empty(int index) { return barrier(C::kStages + index); }
  static CP_DEVICE std::uint32_t full_own() { return barrier(2 * C::kStages); }
  static CP_DEVICE std::uint32_t empty_own() { return barrier(2 * C::kStages + 1); }

 private:
  static CP_DEVICE std::uint32_t barrier(int index) {
    return kBarriers + 8 * static_cast<std::uint32_t>(index);
  }
};

CP_DEVICE bool is_leaf(const GradientOp& op) {
  return op.kind == GradientOpKind::leaf || op.kind == GradientOpKind::continue_leaf;
}

template <class C>
CP_DEVICE void init_barriers(ptx::SharedAddress shared) {
  using Plan = SharedPlan<C>;
  for (int stage = 0; stage < C::kStages; ++stage) {
    ptx::mbarrier_init(shared + Plan::full(stage), 1);
    ptx::mbarrier_init(shared + Plan::empty(stage), kConsumerWarps);
  }
  ptx::mbarrier_init(shared + Plan::full_own(), 1);
  ptx::mbarrier_init(shared + Plan::empty_own(), kConsumerWarps);
  ptx::fence_mbarrier_init();
}

/// By all threads of the block, before anything is loaded.
template <class C>
CP_DEVICE void clear_surplus_panels(const BackwardParams& params, std::byte* memory) {
  constexpr int kPieces = kPanelBytes / 16;
  // Own tiles and stages follow each other.
  for (int half = 0; half < 2 * (kConsumers + C::kStages); ++half) {
    std::byte* const panels = memory + static_cast<std::uint32_t>(half) * SharedPlan<C>::kHalfBytes;
    const int first = (half % 2 == 0 ? params.qk_panels : params.v_panels) * kPieces;
    for (int i = first + static_cast<int>(threadIdx.x); i < C::kPanels * kPieces; i += kThreads) {
      reinterpret_cast<Piece*>(panels)[i] = {};
    }
  }
  ptx::fence_async_proxy();
}

/// The one thread that fills own tiles and stages.
template <class C>
struct Producer {
  using Plan = SharedPlan<C>;
  const BackwardParams& params;
  ptx::SharedAddress shared;
  RingPlace<C> place = {};
  unsigned own_parity = 0;

  CP_DEVICE unsigned panel_bytes() const {
    return static_cast<unsigned>(params.num_panels()) * kPanelBytes;
  }

  /// The own tiles of the next item: `num_rows` rows from `from` on, at most kOwnRows of them.
  CP_DEVICE void load_own(const std::byte* from, std::int64_t tile_bytes, int num_rows) {
    // The first round finds everything free: the phase before the first has the odd parity.
    if (C::kFault != Fault::own_replaced_early) {
      ptx::mbarrier_wait(shared + Plan::empty_own(), own_parity ^ 1u);
    }
    own_parity ^= 1u;
    const int num_tiles = num_rows > kTileRows ? 2 : 1;
    const ptx::SharedAddress full = shared + Plan::full_own();
    ptx::mbarrier_arrive_expect_bytes(full, static_cast<unsigned>(num_tiles) * panel_bytes());
    for (int tile = 0; tile < num_tiles; ++tile) {
      load_panels(shared + Plan::own(tile), from + tile * tile_bytes, full);
    }
  }

  /// The next tile of others, with lse and delta where it has them.
  CP_DEVICE void load_other(const std::byte* from, bool has_scalars) {
    const ptx::SharedAddress full = shared + Plan::full(place.stage);
    if (C::kFault != Fault::no_wait_for_empty) {
      ptx::mbarrier_wait(shared + Plan::empty(place.stage), place.parity ^ 1u);
    }
    const unsigned num_bytes = panel_bytes() + (has_scalars ? Plan::kScalarBytes : 0u);
    ptx::mbarrier_arrive_expect_bytes(
        full, C::kFault == Fault::wrong_byte_count ? num_bytes + 16 : num_bytes);
    load_panels(shared + Plan::stage(place.stage), from, full);
    if (has_scalars) {
      ptx::load_bytes(shared + Plan::scalars(place.stage), from + panel_bytes(), Plan::kScalarBytes,
                      full);
    }
    place.advance();
  }

 private:
  CP_DEVICE void load_panels(ptx::SharedAddress to, const std::byte* from,
                             ptx::SharedAddress full) const {
    const auto first_bytes = static_cast<unsigned>(params.qk_panels) * kPanelBytes;
    ptx::load_bytes(to, from, first_bytes, full);
    ptx::load_bytes(to + Plan::kHalfBytes, from + first_bytes, panel_bytes() - first_bytes, full);
  }
};

}  // namespace cpattn::cuda::sm90_gradient
