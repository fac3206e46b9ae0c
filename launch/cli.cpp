#include "launch/cli.h"

#include <fmt/format.h>

#include <exception>
#include <iostream>
#include <sstream>

#include "launch/cli_load.h"
#include "launch/cli_options.h"
#include "launch/cli_values.h"
#include "launch/cli_yaml.h"
#include "launch/output_file.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// One line on stderr for every line of `text`.
void print_error(std::string_view text) {
  std::istringstream lines{std::string(text)};
  std::string line;
  while (std::getline(lines, line)) std::cerr << "cpattn: error: " << line << "\n";
  std::cerr.flush();
}

std::string overview(std::span<const Subcommand> subcommands) {
  std::string text = fmt::format(
      "cpattn {} - context-parallel attention whose bits do not depend on the split\n\n"
      "Usage: cpattn SUBCOMMAND [options]\n\n",
      CP_VERSION);
  for (const Subcommand& command : subcommands) {
    text += fmt::format("  {:<8} {}\n", command.name, command.summary);
  }
  text +=
      "\n'cpattn SUBCOMMAND --help' lists its options and shows an example.\n"
      "Exit codes: 0 pass, 1 differs, 2 bad input, 3 a required part is unavailable, 4 internal.\n";
  return text;
}

const Subcommand& find_subcommand(std::span<const Subcommand> subcommands,
                                  const std::string& name) {
  std::vector<std::string> names;
  for (const Subcommand& command : subcommands) {
    if (command.name == name) return command;
    names.emplace_back(command.name);
  }
  const std::string nearest = suggestion(name, names);
  throw InvalidArgument("'" + name + "': unknown subcommand" +
                        (nearest.empty() ? "; 'cpattn --help' lists them" : nearest));
}

int run_subcommand(const Subcommand& command, CommandLine& line) {
  const TypedOptions typed = parse_options(command, line.arguments);
  if (typed.wants_help) {
    std::cout << help_text(command);
    return static_cast<int>(ExitCode::pass);
  }
  const RunConfig config = parse_arguments(command, line);
  if (typed.wants_config) {
    std::cout << to_yaml(config);
    return static_cast<int>(ExitCode::pass);
  }
  return command.run(config, line);
}

int dispatch(std::span<const Subcommand> subcommands, int argc, const char* const* argv) {
  CommandLine line;
  line.program = argc > 0 ? argv[0] : "cpattn";
  require(argc > 1, "expected a subcommand; 'cpattn --help' lists them");
  line.subcommand = argv[1];
  line.arguments.assign(argv + 2, argv + argc);
  if (line.subcommand == "--help" || line.subcommand == "--version") {
    require(line.arguments.empty(), line.subcommand, ": takes no arguments");
    std::cout << (line.subcommand == "--help" ? overview(subcommands)
                                              : fmt::format("cpattn {}\n", CP_VERSION));
    return static_cast<int>(ExitCode::pass);
  }
  return run_subcommand(find_subcommand(subcommands, line.subcommand), line);
}

}  // namespace

RunConfig parse_arguments(const Subcommand& subcommand, CommandLine& line) {
  const TypedOptions typed = parse_options(subcommand, line.arguments);
  line.options = typed.options;
  std::vector<Setting> file;
  if (!typed.config_file.empty()) file = read_yaml_file(typed.config_file);
  return load_config(file, typed.knobs, line.given);
}

std::vector<std::string> to_flags(const RunConfig& config) {
  std::vector<std::string> flags;
  for_each_effective_field(config, [&](const RunField& field, const auto& value) {
    if (is_default(field, value)) return;
    flags.push_back(flag_of(field.name) + "=" + format_value(value, ","));
  });
  return flags;
}

int run_command_line(std::span<const Subcommand> subcommands, int argc, const char* const* argv) {
  ExitCode failure = ExitCode::internal;
  hold_standard_streams();
  try {
    const int code = dispatch(subcommands, argc, argv);
    std::cout.flush();
    require<InternalError>(static_cast<bool>(std::cout), "standard output cannot be written");
    return code;
  } catch (const InvalidArgument& error) {
    print_error(error.what());
    failure = ExitCode::bad_input;
  } catch (const Unsupported& error) {
    print_error(error.what());
    failure = ExitCode::unavailable;
  } catch (const std::exception& error) {
    print_error(error.what());
  } catch (...) {
    print_error("an exception of unknown type");
  }
  return static_cast<int>(failure);
}

}  // namespace cpattn
