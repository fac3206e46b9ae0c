// The kernels suite of bench: what RingAttention and RingGradient do on one rank (pack, compute,
// finish) against the peak of the machine and, forward, against the peer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/bench_problem.h"
#include "launch/peer_openblas.h"
#include "launch/run_config.h"

namespace cpattn {

/// Medians over `repetitions`; rates count useful flop only.
struct KernelRecord {
  BenchProblem problem;
  std::string_view isa;
  std::string_view numerics;
  ScheduleKind schedule = ScheduleKind::canonical;
  int threads = 1;  ///< rates are of all of them together
  double gflops = 0.0;
  double peak_gflops = 0.0;
  double fraction_of_peak = 0.0;        ///< median of the ratios, not ratio of the medians
  std::optional<double> target;         ///< fraction wanted; of one thread only
  std::optional<double> ratio_to_peer;  ///< f32 on the last instruction set measured
  std::optional<double> peer_gflops;
  std::optional<double> peer_target;
  std::optional<double> thread_scaling;  ///< rate against that of the first thread count
  double spread = 0.0;                   ///< of fraction_of_peak
  double cpu_share = 0.0;  ///< processor time got / wall time * threads; near 1 on a quiet machine
  std::int64_t repetitions = 0;

  /// "attention/avx512/f32/d128/s2048/causal/t1"; backward: "attention_gradient/...", both:
  /// "attention_and_gradient/..."
  std::string name() const;
};

/// The fraction of peak this project wants of a case; nothing where it promises nothing.
std::optional<double> target_fraction(const BenchProblem& problem, const KernelTable& kernels);

struct KernelSuite {
  const RunConfig& config;
  OpenBlasPeer* peer = nullptr;  ///< may be absent
  std::function<void(const KernelRecord&)> on_record;
  double run_seconds = 0.05;  ///< short problems are repeated up to this
};

/// Runs every case, calling on_record as each is done. InternalError when the peer's result is not
/// ours.
void run_kernel_suite(const KernelSuite& suite);

}  // namespace cpattn
