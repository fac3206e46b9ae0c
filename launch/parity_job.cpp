#include "launch/parity_job.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <thread>

#include "launch/cli_load.h"
#include "launch/cli_values.h"
#include "launch/job_end.h"
#include "launch/job_files.h"
#include "launch/parity_judge.h"
#include "launch/parity_lane.h"
#include "launch/parity_launcher.h"
#include "launch/world.h"
#include "src/base/error.h"
#include "src/comm/loopback_comm.h"

namespace cpattn {
namespace {

/// How a rank that throws ends.
struct Failure {
  ExitCode code = ExitCode::internal;
  std::string message;
};

/// The exception being handled, as an exit code and a text.
Failure current_failure() {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return {ExitCode::bad_input, error.what()};
  } catch (const Unsupported& error) {
    return {ExitCode::unavailable, error.what()};
  } catch (const std::exception& error) {
    return {ExitCode::internal, error.what()};
  } catch (...) {
    return {ExitCode::internal, "an exception of unknown type"};
  }
}

/// Time for the other ranks to say what they saw, before the first to fail takes all of them down.
constexpr std::chrono::milliseconds kLastWords{300};

Inputs agree_and_open(const RunConfig& config, World& world) {
  agree(world.comm, agreement_lines(config),
        deadline_after(Seconds(config.cp_config.timeout_seconds)));
  return open_inputs(config);
}

LaneRun lane_run(const RunConfig& config, const Inputs& inputs, const LaneSpec& spec,
                 std::optional<FaultKind> fault) {
  return {config, *inputs[static_cast<std::size_t>(spec.source)], spec.lane, fault};
}

bool is_on_gpu(const RunConfig& config, bool is_baseline) {
  switch (config.device) {
    case LaneDevice::cpu:
      return false;
    case LaneDevice::cuda:
      return true;
    case LaneDevice::cpu_vs_cuda:
      return !is_baseline;
  }
  return false;
}

ShardPlace place_of(const RunConfig& config, World& world, bool is_baseline) {
  return is_on_gpu(config, is_baseline) ? ShardPlace::on_gpu(config, world)
                                        : ShardPlace::on_cpu(config);
}

void deliver_lanes(const RunConfig& config, World& world, const std::string& directory) {
  const Inputs inputs = agree_and_open(config, world);
  const int size = world.comm.size();
  if (size == 1) {
    const std::vector<LaneSpec> baselines = baseline_specs(config, inputs.size());
    const ShardPlace place = place_of(config, world, true);
    for (std::size_t i = 0; i < baselines.size(); ++i) {
      const auto result =
          run_lane(lane_run(config, inputs, baselines[i], std::nullopt), world, place);
      save_result(baseline_path(directory, i), *result);
    }
  }
  const ShardPlace place = place_of(config, world, false);
  const std::vector<LaneSpec> specs = lane_specs(config, inputs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const InputInfo& info = inputs[static_cast<std::size_t>(specs[i].source)]->info();
    const auto fault = fault_of_lane(config, specs[i], size, info);
    const auto result = run_lane(lane_run(config, inputs, specs[i], fault), world, place);
    if (result) save_result(lane_path(directory, i), *result);
  }
}

/// All lanes at the size of this world, judged by rank 0.
int judge_here(const RunConfig& config, World& world) {
  const Inputs inputs = agree_and_open(config, world);
  require_fault_fits(config, inputs);
  const int size = world.comm.size();
  const std::vector<LaneSpec> specs = lane_specs(config, inputs.size());
  std::vector<std::optional<LaneResult>> results;
  const ShardPlace place = place_of(config, world, false);
  for (const LaneSpec& spec : specs) {
    const InputInfo& info = inputs[static_cast<std::size_t>(spec.source)]->info();
    results.push_back(run_lane(
        lane_run(config, inputs, spec, fault_of_lane(config, spec, size, info)), world, place));
  }
  if (world.comm.rank() != 0) return static_cast<int>(ExitCode::pass);

  Judge judge(config, inputs, usable_cores());
  const std::vector<LaneSpec> baselines = judge.baselines();
  LoopbackWorld(1).run([&](Communicator& alone) {
    World single{alone};
    const ShardPlace baseline_place = place_of(config, single, true);
    for (std::size_t i = 0; i < baselines.size(); ++i) {
      auto result =
          run_lane(lane_run(config, inputs, baselines[i], std::nullopt), single, baseline_place);
      judge.set_baseline(i, std::move(*result));
    }
  });
  ParityReport report = make_report(config, mpi_library_version());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    report.lanes.push_back(judge.judge(i, size, *results[i]));
  }
  judge_fault(config, report);
  return publish(config, report);
}

/// What rank 0 reports when the job fails under the user's mpirun: nothing could be judged.
ParityReport report_of_failure(const RunConfig& config, const Failure& failure) {
  ParityReport report = make_report(config, mpi_library_version());
  report.failure = failure_kind(static_cast<int>(failure.code));
  report.reasons = {failure.message};
  const Inputs inputs = open_inputs(config);
  const Judge judge(config, inputs, 1);
  for (std::size_t lane = 0; lane < judge.lanes().size(); ++lane) {
    report.lanes.push_back(judge.blank_report(lane, config.cp.front()));
    report.lanes.back().failure = report.failure;
    report.lanes.back().reasons = {"the job ended before it could be judged"};
  }
  return report;
}

/// Says on stderr what this rank saw, then ends the job.
int give_up(World& world, const Failure& failure) {
  const std::string who = "rank " + std::to_string(world.comm.rank()) + ": ";
  const bool is_named = failure.message.starts_with(who);
  // One write: the ranks share the terminal.
  std::cerr << "cpattn: error: " + (is_named ? "" : who) + failure.message + "\n" << std::flush;
  std::this_thread::sleep_for(kLastWords);
  world.comm.abort(static_cast<int>(failure.code), failure.message);
  return static_cast<int>(failure.code);
}

/// Of the sizes that were given this job is one: refused when it is not, and told which others are
/// not run, because the verdict does not speak of them.
void require_size_asked(const RunConfig& config, const CommandLine& line, const World& world) {
  const int size = world.comm.size();
  const auto given = line.given.find("cp");
  if (given == line.given.end() || config.cp == std::vector<std::int64_t>{size}) return;
  if (std::find(config.cp.begin(), config.cp.end(), size) != config.cp.end()) {
    if (world.comm.rank() != 0) return;
    std::cerr << detail::concat("cpattn: note: ", given->second, ": of ",
                                format_value(config.cp, ", "), " only ", size,
                                " is run, the ranks that mpirun started\n");
    return;
  }
  throw InvalidArgument(detail::concat(
      given->second, ": asks for ", format_value(config.cp, ", "), ", but mpirun started ", size,
      size == 1 ? " rank" : " ranks", ": give --cp=", size, ", or start cpattn without mpirun"));
}

}  // namespace

std::string lane_path(const std::string& directory, std::size_t lane) {
  return directory + "/lane" + std::to_string(lane) + ".result";
}

std::string baseline_path(const std::string& directory, std::size_t baseline) {
  return directory + "/baseline" + std::to_string(baseline) + ".result";
}

int run_job_rank(const RunConfig& config, const std::string& directory) {
  const int rank = mpirun_rank();
  const TerminationNote note(directory, rank);
  write_started(directory, rank);
  const auto max_bytes = static_cast<std::size_t>(config.cp_config.max_message_bytes);
  try {
    const int code = with_world(max_bytes, [&](World& world) {
      try {
        deliver_lanes(config, world, directory);
      } catch (...) {
        const Failure failure = current_failure();
        write_ended(directory, rank, static_cast<int>(failure.code), failure.message);
        return give_up(world, failure);
      }
      return static_cast<int>(ExitCode::pass);
    });
    if (code == 0) write_ended(directory, rank, code, "");
    return code;
  } catch (...) {
    const Failure failure = current_failure();
    write_ended(directory, rank, static_cast<int>(failure.code), failure.message);
    return static_cast<int>(failure.code);
  }
}

int run_user_rank(const RunConfig& config, const CommandLine& line) {
  const auto max_bytes = static_cast<std::size_t>(config.cp_config.max_message_bytes);
  return with_world(max_bytes, [&](World& world) {
    RunConfig here = config;
    here.cp = {world.comm.size()};
    try {
      // Compared before anything is refused, so that ranks that were told different things all hear
      // of it.
      agree(world.comm, agreement_lines(config),
            deadline_after(Seconds(config.cp_config.timeout_seconds)));
      require_size_asked(config, line, world);
      if (world.comm.rank() == 0) require_reports_writable(config);
      return judge_here(here, world);
    } catch (...) {
      const Failure failure = current_failure();
      const bool was_refused = failure.code == ExitCode::bad_input;
      if (world.comm.rank() == 0 && !was_refused) publish(here, report_of_failure(here, failure));
      return give_up(world, failure);
    }
  });
}

}  // namespace cpattn
