// How the gpu suite takes time, and the peak rate that its other rates are shares of.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/kernel_table.h"
#include "launch/shard_place.h"
#include "launch/world.h"

namespace cpattn {

class GpuTimer {
 public:
  GpuTimer(const ShardPlace& place, World& world) : place_(place), world_(world) {}

  /// Collective. Seconds until all of `times` calls of `work`, which put work into the place's
  /// stream, are done, divided by `times`; of the slowest rank.
  double seconds_per_call(std::int64_t times, const std::function<void()>& work) const;
  const ShardPlace& place() const { return place_; }

 private:
  void wait() const;

  const ShardPlace& place_;
  World& world_;
};

/// How many calls of so many seconds fill `seconds`, at least one.
std::int64_t calls_that_fill(double seconds, double seconds_of_one);

/// Bursts of about 20 ms of the peak rate for one type.
class GpuPeak {
 public:
  /// Collective.
  GpuPeak(const KernelTable& kernels, DType dtype, const GpuTimer& timer);

  /// Collective. flop per second of one GPU, the slowest.
  double run() const;

 private:
  struct Burst {
    double flop = 0.0;
    double seconds = 0.0;
  };
  Burst burst(std::int64_t rounds) const;

  const KernelTable& kernels_;
  DType dtype_;
  const GpuTimer& timer_;
  std::int64_t rounds_ = 1;
};

}  // namespace cpattn
