#include "launch/bench_timing.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "src/base/error.h"

namespace cpattn {
namespace {

using WallClock = std::chrono::steady_clock;

double seconds_of(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

Elapsed time_work(int threads, std::int64_t times, const std::function<void()>& work) {
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_PROCESS_CPUTIME_ID;
  const auto wall_start = WallClock::now();
  const double cpu_start = seconds_of(clock);
  for (std::int64_t i = 0; i < times; ++i) work();
  const double cpu = seconds_of(clock) - cpu_start;
  const std::chrono::duration<double> wall = WallClock::now() - wall_start;
  return {cpu / threads, wall.count()};
}

void settle() {
  constexpr std::chrono::milliseconds kLook{2};
  constexpr int kMaxLooks = 100;
  for (int look = 0; look < kMaxLooks; ++look) {
    const double before = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    std::this_thread::sleep_for(kLook);
    // A tenth of the time slept: more than the sleep itself costs, less than one spinning thread.
    if (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - before < 2e-4) return;
  }
}

void run_threads(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, i);
  body(0);
  for (std::thread& other : others) other.join();
}

PeakBurst::PeakBurst(const KernelTable& kernels, DType dtype, int threads)
    : kernels_(kernels), dtype_(dtype), threads_(threads) {
  constexpr double kBurstSeconds = 0.02;
  constexpr std::int64_t kTrialRounds = 20000;
  rate(kTrialRounds);  // wide units take a moment to power up
  const double flop_per_round = kernels_.burn({.dtype = dtype_});
  const double seconds_per_round = flop_per_round * threads_ / rate(kTrialRounds);
  rounds_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(kBurstSeconds / seconds_per_round));
}

double PeakBurst::run() const { return rate(rounds_); }

double PeakBurst::rate(std::int64_t rounds) const {
  std::vector<double> rates(static_cast<std::size_t>(threads_));
  run_threads(threads_, [&](int thread) {
    const double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    const double flop = kernels_.burn({.dtype = dtype_, .rounds = rounds});
    rates[static_cast<std::size_t>(thread)] = flop / (seconds_of(CLOCK_THREAD_CPUTIME_ID) - start);
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

double median(std::vector<double> values) {
  require<InternalError>(!values.empty(), "the median of nothing");
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2.0;
}

double spread(const std::vector<double>& values) {
  const auto [smallest, largest] = std::minmax_element(values.begin(), values.end());
  return (*largest - *smallest) / median(values);
}

}  // namespace cpattn
