// The ring suite of bench: the distributed passes at several numbers of ranks, in one run.
//
// Outside MPI it starts jobs, in turns, so that all sizes see the same moods of the machine: one
// rank with all cores (the baseline), as many ranks as cores, and twice as many. Inside mpirun it
// measures the ranks it finds. Times are wall-clock, of the slowest rank, between barriers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench_problem.h"
#include "launch/run_config.h"
#include "launch/world.h"

namespace cpattn {

/// What one job measured of one problem under one schedule.
struct RingSamples {
  BenchProblem problem;
  ScheduleKind schedule = ScheduleKind::canonical;
  int ranks = 1;
  int threads = 1;  ///< of each rank
  std::string isa;
  std::string transport;
  bool is_oversubscribed = false;        ///< more threads than the host has cores
  std::vector<double> seconds;           ///< of the problem's pass, slowest rank
  std::vector<double> exposed_seconds;   ///< of it waiting for a hop, longest of any rank
  std::vector<double> transfer_seconds;  ///< the same bytes round the same ring without any work
  std::int64_t bytes_sent = 0;           ///< by one rank in one pass; the most of any
  std::int64_t peak_rss_bytes = 0;       ///< of the largest rank, with both schedules' memory
  double planned_bytes_per_token = 0.0;  ///< see docs/performance.md
};

/// Medians of all samples of one size, problem and schedule.
struct RingRecord {
  RingSamples samples;
  double seconds = 0.0;
  double spread = 0.0;
  double exposed_seconds = 0.0;
  std::optional<double> transfer_seconds;  ///< with more than one rank
  /// 1 - exposed / transfer; not where ranks share cores, because there they wait for each other's
  /// turn, not for bytes.
  std::optional<double> hidden_share;
  std::optional<double> ratio_to_baseline;  ///< its time / ours, median over turns
  std::optional<double> ratio_target;
  std::optional<double> cost_over_arrival;  ///< canonical / arrival - 1, median over pairs
  std::optional<double> cost_target;
  std::int64_t repetitions = 0;

  double tokens_per_second() const;
  double gflops() const;  ///< of all ranks together
  /// "ring/r2t1/avx512/f32/d128/s8192/causal/canonical"; backward: "ring_gradient/...", both:
  /// "ring_and_gradient/..."
  std::string name() const;
};

/// Collective: every problem of the sweep at this world's size, both schedules in turns,
/// `repetitions` times after a warm-up. The same on every rank.
std::vector<RingSamples> measure_ring(const RunConfig& config, World& world);

/// The samples as text for a file, and back.
std::string samples_json(const std::vector<RingSamples>& samples);
std::vector<RingSamples> samples_from_json(const std::string& text);

/// The file in `directory` that rank 0 of a job leaves its samples in.
std::string samples_path(const std::string& directory);

/// One record for each entry of the turns' samples; turns[t][i] must be of the same problem,
/// schedule and size for every t. Entries of one rank are what the others are compared with.
std::vector<RingRecord> ring_records(const std::vector<std::vector<RingSamples>>& turns);

/// Starts the jobs. CommError when one does not deliver.
std::vector<RingRecord> run_ring_jobs(const RunConfig& config);

}  // namespace cpattn
