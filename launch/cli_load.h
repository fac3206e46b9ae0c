// From settings to a RunConfig: defaults, then the file, then the flags; then everything is checked
// at once.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/cli_yaml.h"
#include "launch/run_config.h"

namespace cpattn {

/// Knobs that were given, by key, with the label of the setting that won.
using GivenKnobs = std::map<std::string, std::string, std::less<>>;

/// All keys of RunConfig, in documentation order.
std::vector<std::string> knob_names();

/// "--kv-heads" of "kv_heads".
std::string flag_of(std::string_view key);

/// Defaults, overlaid by `file`, overlaid by `flags`. InvalidArgument lists every problem, one per
/// line: unknown keys, values that are refused, knobs that were given and would have no effect, and
/// shapes and lengths that do not fit together.
RunConfig load_config(std::span<const Setting> file, std::span<const Setting> flags,
                      GivenKnobs& given);

/// "key=value" lines of the knobs that must be equal on all ranks, for agree().
std::string agreement_lines(const RunConfig& config);

}  // namespace cpattn
