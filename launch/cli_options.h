// Flags: the same knobs as in a file, plus the options of a subcommand. Boost.Program_options lives
// here.
#pragma once

#include <string>
#include <vector>

#include "launch/cli.h"
#include "launch/cli_yaml.h"

namespace cpattn {

/// What was typed after the subcommand.
struct TypedOptions {
  std::vector<Setting> knobs;
  std::string config_file;  ///< empty: none
  std::map<std::string, std::string, std::less<>> options;
  bool wants_help = false;
  bool wants_config = false;  ///< --print-config
};

/// InvalidArgument for unknown, repeated, abbreviated and positional arguments and for missing
/// values.
TypedOptions parse_options(const Subcommand& subcommand, const std::vector<std::string>& arguments);

/// The text of `cpattn <subcommand> --help`.
std::string help_text(const Subcommand& subcommand);

}  // namespace cpattn
