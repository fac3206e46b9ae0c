// The gpu suite of bench: what the kernels and copies of a GPU reach, as a share of what that GPU
// can do, and what launches cost. Inside mpirun a rank has a GPU, and the sequence is shared.
//
// Times are the host's between two waits for the stream, around as many calls as fill them; bursts
// of nothing but products lie before and after every measurement.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench_problem.h"
#include "launch/run_config.h"
#include "launch/world.h"

namespace cpattn {

/// Medians over `repetitions`; rates count useful flop only and are those of one GPU.
struct GpuRecord {
  BenchProblem problem;
  ScheduleKind schedule = ScheduleKind::canonical;
  int ranks = 1;
  std::string kernels;    ///< "cuda/sm90"
  std::string numerics;   ///< of the problem's dtype
  std::string transport;  ///< "nccl", ...
  double seconds = 0.0;   ///< of a pass, calls following one another
  double tflops = 0.0;
  double peak_tflops = 0.0;
  double fraction_of_peak = 0.0;  ///< median of the ratios, not ratio of the medians
  double spread = 0.0;            ///< of fraction_of_peak
  std::optional<double> target;
  std::optional<double> cost_over_arrival;  ///< canonical / arrival - 1, median over pairs
  std::optional<double> cost_target;
  /// Of short problems, where the transport can be captured: time of a pass beyond what the GPU
  /// needs for it (which is what a pass takes in a graph of many), call by call and replayed.
  std::optional<double> call_overhead_seconds;
  std::optional<double> replay_overhead_seconds;
  std::optional<double> removed_overhead;  ///< of these two; see removed_overhead_of()
  std::optional<double> removed_target;
  std::int64_t repetitions = 0;

  /// "gpu/cuda/sm90/bf16/d128/s8192/causal/canonical"; backward: "gpu_gradient/...", both:
  /// "gpu_and_gradient/..."
  std::string name() const;
};

/// Bytes read and written by something that only moves them.
struct GpuCopyRecord {
  std::string name;  ///< "copy" (the runtime's own), "pack_kv", "shard_rows"
  double bytes_per_second = 0.0;
  double fraction_of_copy = 0.0;  ///< of "copy", measured beside it
  std::optional<double> target;
  std::int64_t repetitions = 0;
};

struct GpuSuite {
  const RunConfig& config;
  std::function<void(const std::string& description)> on_gpu;  ///< before anything is measured
  std::function<void(const GpuRecord&)> on_record;
  std::function<void(const GpuCopyRecord&)> on_copy;
  double run_seconds = 0.05;  ///< short passes are repeated up to this
};

/// 1 - replay / call overhead; nothing where no call overhead was to be seen, as a share of none
/// means nothing.
std::optional<double> removed_overhead_of(double call_seconds, double replay_seconds);

/// The fraction of peak this project wants: 0.75 / 0.60 (forward / backward) of the kernels for
/// Hopper, 0.45 of the portable forward, in bf16, causal, D = 128, S >= 8192; nothing elsewhere.
std::optional<double> gpu_target(const BenchProblem& problem, const std::string& kernels);

class GpuTimer;

/// How the copies are measured.
struct CopySettings {
  std::int64_t tensor_bytes = 0;  ///< of one tensor; more than the GPU's cache holds, to say much
  std::int64_t repetitions = 0;
  double run_seconds = 0.0;
};
/// Collective. What moves bytes and does nothing else, beside the runtime's own copy. `device` is
/// the current one.
std::vector<GpuCopyRecord> measure_copies(const CopySettings& settings, const GpuTimer& timer,
                                          Device& device);

/// Collective. Callbacks are called on rank 0 only.
/// Errors  Unsupported where there is no GPU or no backend, before anything is measured.
void run_gpu_suite(const GpuSuite& suite, World& world);

}  // namespace cpattn
