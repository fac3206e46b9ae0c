#include "launch/parity_launcher.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>

#include "cp/plan.h"
#include "launch/faults.h"
#include "launch/job_end.h"
#include "launch/job_files.h"
#include "launch/lane_result.h"
#include "launch/mpirun.h"
#include "launch/parity_job.h"
#include "launch/process.h"
#include "launch/world.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// Flop of forward and backward over those of forward: (4 D + 3 Dv) / (D + Dv), at most.
constexpr double kBothDirections = 4.0;
constexpr double kSlowestFlopPerSecond = 2e8;  ///< slower than any build on any machine we know
constexpr Seconds kStartup{60.0};
constexpr Seconds kPatienceBeyondTimeout{2.0};  ///< peers of a late rank speak first, and know more
/// For an mpirun without a rank: it starts them and ends after them within a second or two.
constexpr Seconds kPatienceWithoutRanks{20.0};

/// 1 first: everything else is compared with it.
std::vector<std::int64_t> sizes_to_run(const RunConfig& config) {
  std::vector<std::int64_t> sizes{1};
  for (const std::int64_t size : config.cp) {
    if (size != 1) sizes.push_back(size);
  }
  return sizes;
}

/// Ends a job with a rank that has been stopped for longer than the timeout; shows progress.
class JobWatch {
 public:
  JobWatch(std::string directory, int ranks, std::size_t num_lanes, Seconds patience,
           bool by_mpirun)
      : directory_(std::move(directory)),
        ranks_(ranks),
        by_mpirun_(by_mpirun),
        num_lanes_(num_lanes),
        patience_(patience),
        shows_progress_(::isatty(2) == 1) {}

  std::string look(pid_t launched) {
    if (shows_progress_) show_progress();
    if (const Seconds since = stopped_for(launched); since > patience_) {
      return fmt::format("{} has been stopped for {:.1f} s", ranks_ > 1 ? "mpirun" : "the process",
                         since.count());
    }
    const auto children = children_of(launched);
    if (!children) return "";
    if (const Seconds since = without_ranks_for(children->size()); since > kPatienceWithoutRanks) {
      return fmt::format("mpirun has had no rank running for {:.0f} s", since.count());
    }
    for (const pid_t pid : *children) {
      const Seconds since = stopped_for(pid);
      if (since <= patience_) continue;
      return fmt::format("rank {} (pid {}) has been stopped for {:.1f} s",
                         environment_of(pid, "OMPI_COMM_WORLD_RANK"), pid, since.count());
    }
    return "";
  }

  /// Ranks that are still our program: a pid may have been given away since.
  std::vector<pid_t> survivors() const {
    std::vector<pid_t> pids;
    for (const RankRecord& record : read_records(directory_, ranks_)) {
      if (!record.has_started || record.has_ended) continue;
      std::error_code ignored;
      const auto theirs =
          std::filesystem::read_symlink("/proc/" + std::to_string(record.pid) + "/exe", ignored);
      if (theirs == std::filesystem::read_symlink("/proc/self/exe", ignored)) {
        pids.push_back(record.pid);
      }
    }
    return pids;
  }

  void clear_progress() const {
    if (shows_progress_) std::cerr << "\r\033[K" << std::flush;
  }

 private:
  Seconds stopped_for(pid_t pid) {
    if (!is_stopped(pid)) {
      stopped_since_.erase(pid);
      return Seconds(0);
    }
    const auto [since, is_new] = stopped_since_.try_emplace(pid, Clock::now());
    return Clock::now() - since->second;
  }

  /// An mpirun that lost count of its ranks (no descriptors, no disk) would wait for ever.
  Seconds without_ranks_for(std::size_t num_children) {
    if (num_children > 0 || !by_mpirun_) with_ranks_ = Clock::now();
    return Clock::now() - with_ranks_;
  }

  void show_progress() {
    const double seconds = Seconds(Clock::now() - started_).count();
    if (seconds < 1.0) return;
    std::size_t done = 0;
    while (done < num_lanes_ && std::filesystem::exists(lane_path(directory_, done))) ++done;
    std::cerr << fmt::format("\r\033[Kcp {}: {} of {} lanes, {:.0f} s", ranks_, done, num_lanes_,
                             seconds)
              << std::flush;
  }

  std::string directory_;
  int ranks_;
  bool by_mpirun_;
  std::size_t num_lanes_;
  Seconds patience_;
  bool shows_progress_;
  Clock::time_point started_ = Clock::now();
  Clock::time_point with_ranks_ = started_;
  std::map<pid_t, Clock::time_point> stopped_since_;
};

/// One parity run from outside MPI.
class Launcher {
 public:
  explicit Launcher(const RunConfig& config)
      : config_(config),
        facts_(launch_facts()),
        inputs_(open_inputs(config)),
        judge_(config, inputs_, facts_.cores),
        report_(make_report(config, mpi_library_version())) {
    require_fault_fits(config_, inputs_);
    require_plans(config_, inputs_);
    require_reports_writable(config_);
  }

  int run() {
    for (const std::int64_t size : sizes_to_run(config_)) run_size(static_cast<int>(size));
    directory_.remove();  // a reader that leaves early (| head) ends this process in publish()
    judge_fault(config_, report_);
    return publish(config_, report_);
  }

 private:
  void run_size(int size) {
    const std::string missing = why_no_mpirun(facts_);
    if (size > 1 && !missing.empty()) {
      leave_out(size, 0, {FailureKind::unavailable, {missing}});
      return;
    }
    const std::string directory = directory_.make_inside("cp" + std::to_string(size));
    const JobEnd end = run_job(size, directory);
    run_interruptibly(
        signals_, [&] { collect(size, directory, end); }, [&] { directory_.remove(); });
    std::filesystem::remove_all(directory);
  }

  JobEnd run_job(int size, const std::string& directory) {
    std::vector<std::string> program{std::filesystem::read_symlink("/proc/self/exe").string(),
                                     "parity"};
    for (std::string& flag : to_flags(config_)) program.push_back(std::move(flag));
    program.push_back("--job-dir=" + directory);
    const int threads = threads_per_rank(config_.cp_config.threads, size);
    const bool has_mpirun = why_no_mpirun(facts_).empty();
    const ProcessSpec spec =
        has_mpirun ? mpirun_process(facts_, size, threads, program) : ProcessSpec{program, {}};

    const Seconds timeout(config_.cp_config.timeout_seconds);
    JobWatch job(directory, size, judge_.lanes().size(), timeout + kPatienceBeyondTimeout,
                 has_mpirun);
    const ProcessWatch watch{.time_limit = time_limit(),
                             .look = [&](pid_t pid) { return job.look(pid); },
                             .descendants = [&] { return job.survivors(); }};
    const ProcessOutcome outcome = run_process(spec, signals_, watch);
    job.clear_progress();
    if (const int signal = signals_.pending(Seconds(0)); signal != 0) {
      directory_.remove();
      std::cerr << "cpattn: interrupted; no verdict\n";
      signals_.die_by(signal);
    }
    return explain(outcome, read_records(directory, size));
  }

  /// The last line of defence: every wait inside a job has its own, much earlier deadline.
  Seconds time_limit() const {
    double flop = 0.0;
    for (const LaneSpec& spec : judge_.lanes()) {
      const InputInfo& info = inputs_[static_cast<std::size_t>(spec.source)]->info();
      for (const Document& document : info.batch.documents) {
        flop += 2.0 * static_cast<double>(document.q_tokens) *
                static_cast<double>(document.kv_tokens) *
                static_cast<double>(info.shape.num_heads) *
                static_cast<double>(info.shape.head_dim + info.shape.value_dim) *
                (has_gradients(config_) ? kBothDirections : 1.0);
      }
    }
    return kStartup + 3.0 * Seconds(config_.cp_config.timeout_seconds) +
           Seconds(2.0 * flop / kSlowestFlopPerSecond);
  }

  void collect(int size, const std::string& directory, const JobEnd& end) {
    if (size == 1) {
      for (std::size_t i = 0; i < judge_.baselines().size(); ++i) {
        auto baseline = load_result(baseline_path(directory, i));
        if (baseline) judge_.set_baseline(i, std::move(*baseline));
      }
    }
    std::size_t lane = 0;
    for (; lane < judge_.lanes().size(); ++lane) {
      const auto result = load_result(lane_path(directory, lane));
      if (!result) break;
      report_.lanes.push_back(judge_.judge(lane, size, *result));
    }
    if (lane < judge_.lanes().size()) {
      leave_out(size, lane, end);
    } else if (end.failure != FailureKind::none) {
      // All results are there, and yet a rank did not end well: that is no pass.
      for (const std::string& reason : end.reasons) {
        report_.reasons.push_back(fmt::format("cp {}: {}", size, reason));
      }
      report_.failure = end.failure;
    }
  }

  /// Lanes from `first` on delivered nothing: the first one failed, the others were not reached.
  void leave_out(int size, std::size_t first, const JobEnd& end) {
    const bool was_started = end.failure != FailureKind::unavailable;
    for (std::size_t lane = first; lane < judge_.lanes().size(); ++lane) {
      LaneReport report = judge_.blank_report(lane, size);
      const bool has_failed = lane == first && was_started;
      report.status = has_failed ? LaneStatus::failed : LaneStatus::not_evaluated;
      report.failure = end.failure == FailureKind::none ? FailureKind::internal : end.failure;
      if (lane == first || !was_started) {
        report.reasons = end.reasons;
        if (end.reasons.empty()) report.reasons = {"the job ended well but delivered no result"};
      } else {
        report.reasons = {"not reached: the job ended before"};
      }
      report_.lanes.push_back(std::move(report));
    }
  }

  const RunConfig& config_;
  LaunchFacts facts_;
  Inputs inputs_;
  Judge judge_;
  ParityReport report_;
  PrivateDirectory directory_;
  SignalWatch signals_;
};

}  // namespace

int run_launcher(const RunConfig& config) { return Launcher(config).run(); }

}  // namespace cpattn
