// What the Hopper kernels of whole steps share: a thread block is three warpgroups, a producer and
// two consumers of 64 rows each, and how accumulators and panels look to wgmma.
#pragma once

#include "kernels/cuda/ptx_sm90.h"
#include "kernels/cuda/tile_form.h"

namespace cpattn::cuda::sm90 {

inline constexpr int kGroupThreads = 128;  ///< of a warpgroup
inline constexpr int kConsumers = 2;       ///< warpgroups; warpgroup 0 is the producer's
inline constexpr int kThreads = kGroupThreads * (1 + kConsumers);
inline constexpr int kConsumerThreads = kGroupThreads * kConsumers;
inline constexpr int kConsumerWarps = kConsumerThreads / 32;
inline constexpr int kGroupRows = 64;
inline constexpr int kRowTile = kGroupRows * kConsumers;

/// Registers of a thread of the producer and of a consumer: 128 (24 + 2 * 240) of 65536.
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;

/// Named barriers of both consumers together, and of each.
inline constexpr unsigned kConsumersBarrier = 1;
inline constexpr unsigned kGroupBarrier = 2;

/// From one eight of rows of a panel to the next.
inline constexpr unsigned kEightRowsBytes = 8 * 2 * kPanelColumns;

/// Fragments as the one array that they are to wgmma.
template <int kTiles>
CP_DEVICE float (&flat(float (&fragments)[kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float(&)[4 * kTiles]>(fragments);
}

/// Which of the consumers the calling thread belongs to: by a shuffle, so that the compiler knows
/// it to be the same in all lanes.
CP_DEVICE int consumer_number() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0);
}

/// Where in a ring of C::kStages stages a thread is; parities of phases begin with 0.
template <class C>
struct RingPlace {
  int stage = 0;
  unsigned parity = 0;

  CP_DEVICE void advance() {
    if (++stage == C::kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

}  // namespace cpattn::cuda::sm90
