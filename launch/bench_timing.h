// How bench takes time: processor seconds, bursts of the peak rate beside every run, medians.
//
// Rates are flop / (processor seconds / threads): what others run on the machine takes wall time,
// not processor time. Every run lies between two bursts of register-only multiply-accumulates,
// because the clock of a shared machine moves; the ratio of the two moves much less.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/kernel_table.h"

namespace cpattn {

struct Elapsed {
  double cpu_seconds = 0.0;  ///< per thread
  double wall_seconds = 0.0;
};

/// Runs `work`, which keeps `threads` threads busy, `times` times. With one thread only the calling
/// thread's processor time counts, otherwise the process's, divided.
Elapsed time_work(int threads, std::int64_t times, const std::function<void()>& work);

/// Sleeps until this process uses no processor time: idle threads of a parallel region go on
/// spinning for a while, which must not be charged to what comes next.
void settle();

/// Runs body(0) ... body(threads - 1) at once, body(0) on the calling thread.
void run_threads(int threads, const std::function<void(int)>& body);

/// Bursts of about 20 ms of the peak rate of one instruction set on some threads.
class PeakBurst {
 public:
  PeakBurst(const KernelTable& kernels, DType dtype, int threads);

  /// flop per second of all threads together, each by its own processor time.
  double run() const;

 private:
  double rate(std::int64_t rounds) const;

  const KernelTable& kernels_;
  DType dtype_;
  int threads_;
  std::int64_t rounds_ = 1;
};

/// Of a copy; the mean of the middle two for an even count. InternalError when empty.
double median(std::vector<double> values);

/// (largest - smallest) / median.
double spread(const std::vector<double>& values);

}  // namespace cpattn
