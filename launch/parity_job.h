// The rank's side of parity: what every process under mpirun does.
#pragma once

#include <cstddef>
#include <string>

#include "launch/cli.h"
#include "launch/run_config.h"

namespace cpattn {

/// Where rank 0 leaves the results of a job for the launcher.
std::string lane_path(const std::string& directory, std::size_t lane);
std::string baseline_path(const std::string& directory, std::size_t baseline);

/// One rank of a job that our launcher started: runs the lanes (on a single rank the baselines
/// first), delivers into `directory`, says how it ended.
int run_job_rank(const RunConfig& config, const std::string& directory);

/// One rank of a job that the user started with mpirun: runs the lanes at this size; rank 0 makes
/// the single-rank run, judges and prints.
int run_user_rank(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
