// The jobs of the ring suite: sizes take turns, each turn starts one mpirun per size.
#include <fmt/core.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "launch/bench_ring.h"
#include "launch/cli.h"
#include "launch/job_files.h"
#include "launch/mpirun.h"
#include "launch/process.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr std::int64_t kTurns = 5;
constexpr std::int64_t kPairsPerJob = 2;  ///< both schedules, each going first once

struct JobSize {
  int ranks = 1;
  int threads = 1;
};

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class RingJobs {
 public:
  explicit RingJobs(const RunConfig& config) : config_(config), facts_(launch_facts()) {
    require(config.thread_counts.empty(), "thread_counts: the ring suite divides the cores itself");
    const std::string missing = why_no_mpirun(facts_);
    require<Unsupported>(missing.empty(), missing);
  }

  std::vector<RingSamples> turn() {
    const int cores = facts_.cores;
    std::vector<JobSize> sizes{{1, cores}};
    if (cores > 1) sizes.push_back({cores, 1});
    sizes.push_back({2 * cores, 1});
    std::vector<RingSamples> all;
    for (const JobSize size : sizes) {
      for (RingSamples& samples : run(size)) all.push_back(std::move(samples));
    }
    return all;
  }

 private:
  std::vector<RingSamples> run(JobSize size) {
    RunConfig job = config_;
    job.repetitions = kPairsPerJob;
    job.thread_counts = {size.threads};
    std::vector<std::string> program{std::filesystem::read_symlink("/proc/self/exe").string(),
                                     "bench"};
    for (std::string& flag : to_flags(job)) program.push_back(std::move(flag));
    program.push_back("--job-dir=" + directory_.path());
    std::filesystem::remove(samples_path(directory_.path()));

    const ProcessOutcome outcome =
        run_process(mpirun_process(facts_, size.ranks, size.threads, program), signals_, {});
    if (const int signal = signals_.pending(Seconds(0)); signal != 0) {
      directory_.remove();
      signals_.die_by(signal);
    }
    require<CommError>(outcome.exit_code == 0 && !outcome.was_ended_by_us, "the job of ",
                       size.ranks, " ranks ended with exit code ", outcome.exit_code, " ",
                       outcome.why_ended, "\n", outcome.output);
    return samples_from_json(file_text(samples_path(directory_.path())));
  }

  const RunConfig& config_;
  LaunchFacts facts_;
  PrivateDirectory directory_;
  SignalWatch signals_;
};

}  // namespace

std::vector<RingRecord> run_ring_jobs(const RunConfig& config) {
  RingJobs jobs(config);
  const std::int64_t turns = config.repetitions == 0 ? kTurns : config.repetitions;
  std::vector<std::vector<RingSamples>> samples;
  for (std::int64_t turn = 0; turn < turns; ++turn) samples.push_back(jobs.turn());
  return ring_records(samples);
}

}  // namespace cpattn
