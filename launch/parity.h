// `cpattn parity`: the same attention on 1, 2, 4, ... ranks, compared bit for bit with one rank and
// with double precision.
//
// Outside MPI it starts mpirun for every size, single rank first, and judges what the ranks
// deliver. Under `mpirun -n N cpattn parity` it is one such size: rank 0 makes the single-rank run
// itself.
#pragma once

#include "launch/cli.h"
#include "launch/run_config.h"

namespace cpattn {

/// The subcommand as the table in main() lists it.
Subcommand parity_subcommand();

/// Errors  those of the configuration and of the inputs; failures of ranks are lanes of the report,
///         not exceptions.
int run_parity(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
