// docs/configuration.md, made from the declarations of the knobs.
#pragma once

#include <string>

#include "launch/cli.h"

namespace cpattn {

/// The whole page; the committed one must equal it.
std::string configuration_markdown();

/// The subcommand as the table in main() lists it.
Subcommand docs_subcommand();

/// `cpattn docs`: prints the page.
int run_docs(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
