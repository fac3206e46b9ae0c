// What the lanes of a warp, or the threads of a warpgroup, do together: each brings its operand and
// waits; the last one to come does the work for all.
//
// None of this orders memory accesses, on the device neither; sync_warp does.
#pragma once

#include <cstddef>
#include <type_traits>

#include "kernels/cuda/host/thread.h"

namespace cpattn::cuda_host {

/// Operands of the lanes that take part.
struct Lanes {
  unsigned mask = 0;
  void* const* operand = nullptr;

  template <class Operand>
  Operand& of(unsigned lane) const {
    return *static_cast<Operand*>(operand[lane]);
  }
};

/// One per instruction; lanes that meet must have come for the same one.
struct WarpOperation {
  const char* name;
  void (*perform)(const Lanes& lanes);
  bool needs_all_lanes;  ///< a lane that has exited is an error, not an absentee
};

/// The calling lane waits until all lanes of `mask` that have not exited are here.
void meet_warp(const WarpOperation& operation, unsigned mask, void* operand);

struct WarpgroupOperation {
  const char* name;
  void (*perform)(void* const* operand);  ///< of 128 threads
};

/// Likewise for the 128 threads of the calling thread's warpgroup.
void meet_warpgroup(const WarpgroupOperation& operation, void* operand);

/// Accesses of the lanes before it happen before those of the lanes after it.
void sync_warp(unsigned mask);

/// Which lane a shuffle reads, as PTX defines it for segments of `width` lanes.
enum class ShuffleKind { index, up, down, butterfly };

/// `bytes` (4 or 8) from the lane that `kind` and `argument` name.
void shuffle(ShuffleKind kind, unsigned mask, int argument, int width, const void* in, void* out,
             std::size_t bytes);

/// Bit i: lane i takes part and its predicate holds.
unsigned ballot(unsigned mask, bool predicate);

template <class T>
T shuffled(ShuffleKind kind, unsigned mask, T value, int argument, int width) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  T result;
  shuffle(kind, mask, argument, width, &value, &result, sizeof(T));
  return result;
}

struct DeviceThread;
/// Lanes that wait for one that has exited go on without it, or fail. For Block.
void lane_exits(Block& block, const DeviceThread& thread);

}  // namespace cpattn::cuda_host
