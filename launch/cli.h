// The command line of `cpattn`: subcommands, their options, and the one place where an exception
// becomes an exit code.
//
// Knobs (launch/run_config.h) are flags of every subcommand that accepts their group, and keys of
// the file given by --config; a flag wins over the file. A flag is given once.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/run_config.h"

namespace cpattn {

/// What the process ends with.
enum class ExitCode : int {
  pass = 0,
  differs = 1,      ///< it ran, and what it found is not what was promised
  bad_input = 2,    ///< flags, files or tensors that are refused; nothing was executed
  unavailable = 3,  ///< a part that this build or this machine does not have
  internal = 4,     ///< a rank or the network failed, or a bug of ours
};

/// An option of one subcommand that is not a knob: how to answer, not what to run.
struct CommandOption {
  std::string_view name;        ///< "json", without dashes
  std::string_view value_name;  ///< "FILE"; empty for a switch
  std::string_view help;
};

/// One invocation as it was typed, after RunConfig took its part.
struct CommandLine {
  std::string program;                 ///< argv[0]
  std::string subcommand;              ///< "parity"
  std::vector<std::string> arguments;  ///< everything after the subcommand, untouched
  /// Options of the subcommand that were given; the value of a switch is empty.
  std::map<std::string, std::string, std::less<>> options;
  /// Knobs that were given, by key, and where: "--heads" or "configs/x.yaml:4: heads".
  std::map<std::string, std::string, std::less<>> given;

  bool has(std::string_view option) const { return options.contains(option); }
  /// The value of an option, or `fallback` when it was not given.
  std::string value(std::string_view option, std::string_view fallback = "") const {
    const auto entry = options.find(option);
    return entry == options.end() ? std::string(fallback) : entry->second;
  }
};

/// Bits of FieldGroup.
constexpr unsigned operator|(FieldGroup a, FieldGroup b) {
  return static_cast<unsigned>(a) | static_cast<unsigned>(b);
}
constexpr unsigned operator|(unsigned a, FieldGroup b) { return a | static_cast<unsigned>(b); }

inline constexpr unsigned kNoKnobs = 0;
inline constexpr unsigned kProblemKnobs = FieldGroup::lanes | FieldGroup::ring |
                                          FieldGroup::kernels | FieldGroup::file |
                                          FieldGroup::synthetic | FieldGroup::heads;
inline constexpr unsigned kAllKnobs =
    kProblemKnobs | FieldGroup::parity | FieldGroup::device | FieldGroup::gpu;
inline constexpr unsigned kPlanKnobs =
    kProblemKnobs | FieldGroup::device | FieldGroup::gpu | FieldGroup::planned;
inline constexpr unsigned kBenchKnobs = FieldGroup::heads | FieldGroup::bench | FieldGroup::gpu;

struct Subcommand {
  std::string_view name;
  std::string_view summary;
  std::string_view example;
  unsigned knobs = kNoKnobs;  ///< groups it accepts as flags; a file may hold all of them
  std::vector<CommandOption> options;
  int (*run)(const RunConfig& config, const CommandLine& line) = nullptr;
};

/// Runs one invocation: finds the subcommand, answers --help, --version and --print-config, loads
/// the configuration, calls the subcommand, and turns exceptions into "cpattn: error: ..." on
/// stderr and an ExitCode. Never throws.
int run_command_line(std::span<const Subcommand> subcommands, int argc, const char* const* argv);

/// Reads flags and the file of --config into `line` and a RunConfig. InvalidArgument lists every
/// problem, one per line.
RunConfig parse_arguments(const Subcommand& subcommand, CommandLine& line);

/// "--key=value" for every knob that differs from its default: what gives another process the same
/// RunConfig.
std::vector<std::string> to_flags(const RunConfig& config);

}  // namespace cpattn
