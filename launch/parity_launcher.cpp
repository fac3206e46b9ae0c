#include "launch/parity_launcher.h"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "cp/plan.h"
#include "launch/faults.h"
#include "launch/job_files.h"
#include "launch/mpirun.h"
#include "launch/parity_job.h"
#include "launch/process.h"
#include "launch/world.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr double kSlowestFlopPerSecond = 2e8;  ///< slower than any build on any machine we know
constexpr Seconds kStartup{60.0};
constexpr Seconds kPatienceBeyondTimeout{2.0};  ///< peers of a late rank speak first, and know more

/// 1 first: everything else is compared with it.
std::vector<std::int64_t> sizes_to_run(const RunConfig& config) {
  std::vector<std::int64_t> sizes{1};
  for (const std::int64_t size : config.cp) {
    if (size != 1) sizes.push_back(size);
  }
  return sizes;
}

/// What became of the job of one size.
struct JobEnd {
  FailureKind failure = FailureKind::none;
  std::vector<std::string> reasons;
};

FailureKind failure_of(int exit_code) {
  if (exit_code == static_cast<int>(ExitCode::bad_input)) return FailureKind::bad_input;
  if (exit_code == static_cast<int>(ExitCode::unavailable)) return FailureKind::unavailable;
  return FailureKind::internal;
}

/// The last lines of what a job printed, for a failure nobody explained.
std::string last_lines(const std::string& output, std::size_t count) {
  std::istringstream stream(output);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    const bool is_ruler = line.find_first_not_of("- ") == std::string::npos;
    if (!is_ruler) lines.push_back(line);
  }
  std::string text;
  for (std::size_t i = lines.size() > count ? lines.size() - count : 0; i < lines.size(); ++i) {
    text += (text.empty() ? "" : " | ") + lines[i];
  }
  return text;
}

/// Everything the records and mpirun say about a job; no reason at all only if every rank started,
/// and said that it ended well, and mpirun agrees.
JobEnd explain(const ProcessOutcome& outcome, const std::vector<RankRecord>& records) {
  JobEnd end;
  const auto add = [&](FailureKind kind, std::string reason) {
    if (end.failure == FailureKind::none) end.failure = kind;
    end.reasons.push_back(std::move(reason));
  };
  const auto notice = find_death_notice(outcome.output);
  std::set<std::string> said;  // ranks that saw the same thing say it once
  for (const RankRecord& record : records) {
    const bool was_taken_down = record.exit_code == 128 + SIGTERM;
    if (!record.has_ended || record.exit_code == 0 || was_taken_down) continue;
    if (!said.insert(record.message).second) continue;
    const std::string who = fmt::format("rank {}: ", record.rank);
    const bool is_named = record.message.starts_with(who);
    add(failure_of(record.exit_code), (is_named ? "" : who) + record.message);
  }
  for (const RankRecord& record : records) {
    if (record.has_ended) continue;
    if (!record.has_started) {
      add(FailureKind::internal, fmt::format("rank {} never started", record.rank));
      continue;
    }
    std::string how = "without a word";
    if (notice && notice->rank == record.rank) how += ": " + notice->text;
    add(FailureKind::internal,
        fmt::format("rank {} (pid {}) ended {}", record.rank, record.pid, how));
  }
  if (outcome.was_ended_by_us) {
    add(FailureKind::internal, "the launcher ended the job: " + outcome.why_ended);
  } else if (outcome.exit_code != 0 && end.reasons.empty()) {
    add(failure_of(outcome.exit_code),
        fmt::format("the job ended with exit code {}: {}", outcome.exit_code,
                    last_lines(outcome.output, 6)));
  }
  return end;
}

/// Ends a job with a rank that has been stopped for longer than the timeout; shows progress.
class JobWatch {
 public:
  JobWatch(std::string directory, int ranks, std::size_t num_lanes, Seconds patience)
      : directory_(std::move(directory)),
        ranks_(ranks),
        num_lanes_(num_lanes),
        patience_(patience),
        shows_progress_(::isatty(2) == 1) {}

  std::string look(pid_t launched) {
    if (shows_progress_) show_progress();
    const auto stopped = stopped_for(launched);
    if (stopped > patience_) {
      return fmt::format("{} has been stopped for {:.1f} s", ranks_ > 1 ? "mpirun" : "the process",
                         stopped.count());
    }
    for (const RankRecord& record : read_records(directory_, ranks_)) {
      if (!record.has_started || record.has_ended) continue;
      const Seconds since = stopped_for(record.pid);
      if (since > patience_) {
        return fmt::format("rank {} (pid {}) has been stopped for {:.1f} s", record.rank,
                           record.pid, since.count());
      }
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
  std::size_t num_lanes_;
  Seconds patience_;
  bool shows_progress_;
  Clock::time_point started_ = Clock::now();
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
  }

  int run() {
    for (const std::int64_t size : sizes_to_run(config_)) run_size(static_cast<int>(size));
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
    JobWatch job(directory, size, judge_.lanes().size(), timeout + kPatienceBeyondTimeout);
    const ProcessWatch watch{.time_limit = time_limit(),
                             .look = [&](pid_t pid) { return job.look(pid); },
                             .descendants = [&] { return job.survivors(); }};
    const ProcessOutcome outcome = run_process(spec, signals_, watch);
    job.clear_progress();
    if (const int signal = signals_.pending(Seconds(0)); signal != 0) {
      std::cerr << "cpattn: interrupted; no verdict\n";
      directory_.remove();
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
                static_cast<double>(info.shape.head_dim + info.shape.value_dim);
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
