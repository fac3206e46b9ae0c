// How keys and values reach the warpgroups of the Hopper forward: the plan of shared memory, the
// ring of stages with its mbarriers, and the producer, one thread that fills it.
//
// A *step* is one or two packed tiles of keys with their values. In shared memory the panels of a
// step are as tall as the step: the tiles' panels of the same columns lie one below the other, so
// that one wgmma spans them. Keys and values of a stage have barriers of their own, since keys are
// done with one step earlier. Producer and consumers derive the same steps from the same image;
// nothing but the barriers passes between them.
#pragma once

#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/warpgroups_sm90.h"

namespace cpattn::cuda::sm90 {

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  wrong_byte_count,
  no_wait_for_full,
  no_wait_for_empty,
  wrong_stride,
  no_barrier_after_queries,
  hidden_values_as_numbers,
  no_gathering,
};

/// Keys of up to 64 kKeyPanels channels, values of up to 64 kPanels, steps of kStepTiles tiles.
/// Registers decide: a consumer holds 32 kPanels sums, 32 kStepTiles scores and half as many words
/// of weights. Everything but a stage's contents is known to the compiler, since wgmma does not
/// bear loops that it cannot unroll. Panels that a problem does not have are never loaded: those of
/// keys are zero from the beginning, those of values may be anything, as nothing reads their sums.
template <class T_, int kKeyPanels_, int kPanels_, int kStepTiles_, Fault kFault_ = Fault::none>
struct Config {
  using T = T_;
  static constexpr int kKeyPanels = kKeyPanels_;
  static constexpr int kPanels = kPanels_;
  static constexpr int kStepTiles = kStepTiles_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kStepKeys = kStepTiles * kTileRows;
  static constexpr std::uint32_t kStepPanelBytes = kStepTiles * kPanelBytes;
  static constexpr int kStages = 2;
};

/// Shared memory: q of either consumer, the stages, barriers, and what guard_values leaves.
template <class C>
struct SharedPlan {
  static constexpr std::uint32_t kQueryBytes = C::kKeyPanels * kPanelBytes;  ///< of a consumer
  static constexpr std::uint32_t kKeyBytes = C::kKeyPanels * C::kStepPanelBytes;
  static constexpr std::uint32_t kStageBytes = kKeyBytes + C::kPanels * C::kStepPanelBytes;
  static constexpr std::uint32_t kStages = kConsumers * kQueryBytes;
  static constexpr std::uint32_t kBarriers = kStages + C::kStages * kStageBytes;
  /// A word of each consumer thread: whether it has found special values.
  static constexpr std::uint32_t kFindings = kBarriers + 4 * 8 * C::kStages;
  /// For each channel the first key of the step whose value is special.
  static constexpr std::uint32_t kFirstSpecial = kFindings + 4 * kConsumerThreads;
  static constexpr std::uint32_t kBytes = kFirstSpecial + 4 * kPanelColumns * C::kPanels;

  static CP_DEVICE std::uint32_t queries(int consumer) {
    return static_cast<std::uint32_t>(consumer) * kQueryBytes;
  }
  static CP_DEVICE std::uint32_t keys(int stage) {
    return kStages + static_cast<std::uint32_t>(stage) * kStageBytes;
  }
  static CP_DEVICE std::uint32_t values(int stage) { return keys(stage) + kKeyBytes; }
  static CP_DEVICE std::uint32_t full_keys(int stage) { return barrier(0, stage); }
  static CP_DEVICE std::uint32_t full_values(int stage) { return barrier(1, stage); }
  static CP_DEVICE std::uint32_t empty_keys(int stage) { return barrier(2, stage); }
  static CP_DEVICE std::uint32_t empty_values(int stage) { return barrier(3, stage); }

 private:
  static CP_DEVICE std::uint32_t barrier(int kind, int stage) {
    return kBarriers + 8 * static_cast<std::uint32_t>(kind * C::kStages + stage);
  }
};

/// What the rows of an item read of one block of keys.
struct KeyWalk {
  const std::byte* source = nullptr;  ///< the packed tiles of the head
  int num_keys = 0;                   ///< of the block
  int first_limit = 0;                ///< keys that row 0 of the item sees; see Visible
  int num_tiles = 0;                  ///< that any row sees

  template <class C>
  CP_DEVICE int num_steps() const {
    return (num_tiles + C::kStepTiles - 1) / C::kStepTiles;
  }
};

CP_DEVICE KeyWalk key_walk(const ForwardParams& params, const ForwardItem& item, const TileOp& op) {
  const StepImage& image = *params.image;
  const KeyBlock block = image.part<KeyBlock>(image.kv_blocks)[op.kv_block];
  const auto num_keys = static_cast<int>(block.num_keys);
  const int first_limit = op.first_row_limit + item.first_row;
  const int last_limit = first_limit + item.num_rows - 1;
  const int seen_keys = last_limit < num_keys ? last_limit : num_keys;
  return {block.packed + item.head / params.group_size * params.form.head_bytes(num_keys), num_keys,
          first_limit, seen_keys > 0 ? (seen_keys + kTileRows - 1) / kTileRows : 0};
}

template <class C>
CP_DEVICE void init_barriers(ptx::SharedAddress shared) {
  using Plan = SharedPlan<C>;
  for (int stage = 0; stage < C::kStages; ++stage) {
    ptx::mbarrier_init(shared + Plan::full_keys(stage), 1);
    ptx::mbarrier_init(shared + Plan::full_values(stage), 1);
    ptx::mbarrier_init(shared + Plan::empty_keys(stage), kConsumerWarps);
    ptx::mbarrier_init(shared + Plan::empty_values(stage), kConsumerWarps);
  }
  ptx::fence_mbarrier_init();
}

/// By all threads of the block, before anything is loaded.
template <class C>
CP_DEVICE void clear_surplus_keys(const KvForm& form, std::byte* memory) {
  const auto first = static_cast<std::uint32_t>(form.k_panels) * C::kStepPanelBytes;
  for (int stage = 0; stage < C::kStages; ++stage) {
    std::byte* const keys = memory + SharedPlan<C>::keys(stage);
    for (std::uint32_t at = first + threadIdx.x * sizeof(Piece); at < SharedPlan<C>::kKeyBytes;
         at += kThreads * sizeof(Piece)) {
      *reinterpret_cast<Piece*>(keys + at) = Piece{};
    }
  }
  ptx::fence_async_proxy();
}

/// `panels` panels of each of `num_tiles` tiles.
template <class C>
CP_DEVICE void load_panels(ptx::SharedAddress to, const std::byte* from, int panels, int num_tiles,
                           std::int64_t tile_bytes, ptx::SharedAddress full) {
  const auto num_bytes = static_cast<unsigned>(num_tiles * panels * kPanelBytes);
  ptx::mbarrier_arrive_expect_bytes(
      full, C::kFault == Fault::wrong_byte_count ? num_bytes + 16 : num_bytes);
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int panel = 0; panel < panels; ++panel) {
      ptx::load_bytes(to + static_cast<std::uint32_t>(panel) * C::kStepPanelBytes +
                          static_cast<std::uint32_t>(tile * kPanelBytes),
                      from + tile * tile_bytes + panel * kPanelBytes, kPanelBytes, full);
    }
  }
}

/// Fills the ring with all steps of all ops of all items of the block.
template <class C>
CP_DEVICE void produce(const ForwardParams& params, ptx::SharedAddress shared) {
  using Plan = SharedPlan<C>;
  const StepImage& image = *params.image;
  const int num_items = image.num_tiles * params.num_heads;
  RingPlace<C> place;
  // The first round finds the stages free: the phase before the first has the odd parity.
  const auto wait_until_free = [&](ptx::SharedAddress empty) {
    if (C::kFault != Fault::no_wait_for_empty) ptx::mbarrier_wait(empty, place.parity ^ 1u);
  };
  for (int i = static_cast<int>(blockIdx.x); i < num_items; i += static_cast<int>(gridDim.x)) {
    const ForwardItem item = forward_item(params, i, kRowTile);
    for (std::int32_t at = item.program->op_begin; at < item.program->op_end; ++at) {
      const TileOp op = image.part<TileOp>(image.ops)[at];
      if (op.kind != TileOpKind::block && op.kind != TileOpKind::accumulate) continue;
      const KeyWalk walk = key_walk(params, item, op);
      const std::byte* source = walk.source;
      const std::int64_t tile_bytes = params.form.tile_bytes();
      for (int left = walk.num_tiles; left > 0; left -= C::kStepTiles) {
        const int num_tiles = left < C::kStepTiles ? left : C::kStepTiles;
        wait_until_free(shared + Plan::empty_keys(place.stage));
        load_panels<C>(shared + Plan::keys(place.stage), source, params.form.k_panels, num_tiles,
                       tile_bytes, shared + Plan::full_keys(place.stage));
        wait_until_free(shared + Plan::empty_values(place.stage));
        load_panels<C>(shared + Plan::values(place.stage), source + params.form.k_tile_bytes(),
                       params.form.v_panels, num_tiles, tile_bytes,
                       shared + Plan::full_values(place.stage));
        source += C::kStepTiles * tile_bytes;
        place.advance();
      }
    }
  }
}

}  // namespace cpattn::cuda::sm90
