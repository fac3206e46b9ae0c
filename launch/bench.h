// `cpattn bench`: rates against the peak of the machine and a peer, and what more ranks cost.
#pragma once

#include "launch/cli.h"
#include "launch/run_config.h"

namespace cpattn {

/// The subcommand as the table in main() lists it.
Subcommand bench_subcommand();

/// Exit code pass whenever everything ran: a rate below its target is marked in the table, and no
/// failure, because it says as much of the machine's other work as of ours.
/// Errors  Unsupported for an instruction set or an mpirun this machine lacks; CommError when a job
///         of the ring suite fails.
int run_bench(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
