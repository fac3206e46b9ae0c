// `cpattn plan`: prints what a run would do, without running it.
#pragma once

#include "launch/cli.h"

namespace cpattn {

/// The subcommand as the table in main() lists it.
Subcommand plan_subcommand();

/// Text or, with --json, JSON for every lane and size; --rank R shows the steps of that rank.
int run_plan(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
