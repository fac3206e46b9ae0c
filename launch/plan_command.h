// `cpattn plan`: prints what a run would do, without running it.
#pragma once

#include "launch/cli.h"

namespace cpattn {

/// Text or, with --json, JSON for every lane and size; --rank R shows the steps of that rank.
int run_plan(const RunConfig& config, const CommandLine& line);

/// Its options besides the knobs.
std::vector<CommandOption> plan_options();

}  // namespace cpattn
