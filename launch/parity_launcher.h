// The launcher's side of parity: starts a job for every size, watches it, judges what it delivered.
#pragma once

#include <string>

#include "launch/parity_judge.h"
#include "launch/report.h"
#include "launch/run_config.h"

namespace cpattn {

/// Refuses a fault that no lane at any of the sizes can hold (InvalidArgument says what it needs).
void require_fault_fits(const RunConfig& config, const Inputs& inputs);

/// Plans every lane at every size, so that what cannot run is refused before anything starts.
void require_plans(const RunConfig& config, const Inputs& inputs);

/// Finds out before the run whether the files it is to write can be written (InvalidArgument).
void require_reports_writable(const RunConfig& config);

/// An empty report of this machine and configuration.
ParityReport make_report(const RunConfig& config, const std::string& mpi_version);

/// A planted fault must have been planted and seen; otherwise the run fails for that reason.
void judge_fault(const RunConfig& config, ParityReport& report);

/// Prints the report, writes the files that were asked for, and gives the exit code.
int publish(const RunConfig& config, const ParityReport& report);

int run_launcher(const RunConfig& config);

}  // namespace cpattn
