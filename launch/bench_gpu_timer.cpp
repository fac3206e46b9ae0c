#include "launch/bench_gpu_timer.h"

#include <algorithm>
#include <cmath>

#include "src/comm/max_over_ranks.h"

namespace cpattn {
namespace {

constexpr Seconds kTimeout{120.0};

}  // namespace

void GpuTimer::wait() const {
  place_.transport(world_.comm).synchronize(place_.stream(), deadline_after(kTimeout));
}

double GpuTimer::seconds_per_call(std::int64_t times, const std::function<void()>& work) const {
  wait();
  world_.comm.barrier(deadline_after(kTimeout), "start of a measurement");
  const Clock::time_point start = Clock::now();
  for (std::int64_t i = 0; i < times; ++i) work();
  wait();
  auto seconds = static_cast<float>(Seconds(Clock::now() - start).count());
  max_over_ranks(world_.comm, {&seconds, 1}, deadline_after(kTimeout));
  return static_cast<double>(seconds) / static_cast<double>(times);
}

std::int64_t calls_that_fill(double seconds, double seconds_of_one) {
  constexpr double kMostCalls = 1000.0;
  return static_cast<std::int64_t>(
      std::clamp(std::ceil(seconds / seconds_of_one), 1.0, kMostCalls));
}

GpuPeak::GpuPeak(const KernelTable& kernels, DType dtype, const GpuTimer& timer)
    : kernels_(kernels), dtype_(dtype), timer_(timer) {
  constexpr double kTrialSeconds = 0.005, kBurstSeconds = 0.02;
  burst(rounds_);  // the first launch loads the kernel
  double seconds = burst(rounds_).seconds;
  for (; seconds < kTrialSeconds; seconds = burst(rounds_).seconds) rounds_ *= 2;
  rounds_ *= calls_that_fill(kBurstSeconds, seconds);
}

double GpuPeak::run() const {
  const Burst done = burst(rounds_);
  return done.flop / done.seconds;
}

GpuPeak::Burst GpuPeak::burst(std::int64_t rounds) const {
  Burst done;
  done.seconds = timer_.seconds_per_call(1, [&] {
    done.flop = kernels_.burn({dtype_, rounds, kernels_.num_workers, timer_.place().stream()});
  });
  return done;
}

}  // namespace cpattn
