#include "launch/cli_options.h"

#include <fmt/format.h>

#include <boost/program_options.hpp>
#include <set>
#include <sstream>

#include "launch/cli_load.h"
#include "launch/cli_values.h"
#include "src/base/error.h"

namespace po = boost::program_options;

namespace cpattn {
namespace {

bool accepts(const Subcommand& subcommand, FieldGroup group) {
  return (subcommand.knobs & static_cast<unsigned>(group)) != 0;
}

std::string_view heading(FieldGroup group) {
  switch (group) {
    case FieldGroup::lanes:
      return "Lanes (lists; every combination is run)";
    case FieldGroup::ring:
      return "Ring";
    case FieldGroup::kernels:
      return "Kernels";
    case FieldGroup::file:
      return "Inputs from a file";
    case FieldGroup::synthetic:
      return "Synthetic inputs";
    case FieldGroup::parity:
      return "Comparison and reports";
    case FieldGroup::heads:
      return "Heads";
    case FieldGroup::gpu:
      return "GPUs";
    case FieldGroup::device:
      return "Device";
    case FieldGroup::planned:
      return "The GPU that is planned for";
    case FieldGroup::bench:
      return "Benchmark (lists; every combination is measured)";
  }
  return "?";
}

template <class T>
std::string value_name(const RunField& field, const T&) {
  if constexpr (kIsList<T>) {
    return value_name(field, typename T::value_type{}) + ",...";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return field.rule == TextRule::any ? "TEXT" : "WORD";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "BOOL";
  } else if constexpr (std::is_enum_v<T>) {
    return "WORD";
  } else {
    return "N";
  }
}

template <class T>
std::string described(const RunField& field, const T& value) {
  const std::string default_text =
      field.unset.empty() ? format_value(value, ",") : std::string(field.unset);
  const bool is_free_text = std::is_same_v<T, std::string> && field.rule == TextRule::any;
  const std::string what = is_free_text ? "" : "; " + expected_value(field, value);
  return fmt::format("{}{} (default: {})", field.help, what, default_text);
}

constexpr std::array kGroups{FieldGroup::lanes,   FieldGroup::ring,      FieldGroup::kernels,
                             FieldGroup::file,    FieldGroup::synthetic, FieldGroup::heads,
                             FieldGroup::parity,  FieldGroup::device,    FieldGroup::gpu,
                             FieldGroup::planned, FieldGroup::bench};
constexpr unsigned kHelpColumns = 100;

void add_option(po::options_description& options, const std::string& flag,
                const std::string& value_name, const std::string& help) {
  if (value_name.empty()) {
    options.add_options()(flag.c_str(), help.c_str());
  } else {
    auto* const value = po::value<std::string>()->value_name(value_name);
    if (value_name == "BOOL") value->implicit_value("true");  // --flag and --flag=false
    options.add_options()(flag.c_str(), value, help.c_str());
  }
}

/// All flags of a subcommand, grouped for --help.
std::vector<po::options_description> describe(const Subcommand& subcommand) {
  std::vector<po::options_description> groups;
  po::options_description general("General", kHelpColumns);
  add_option(general, "help", "", "prints this text");
  if (subcommand.knobs != kNoKnobs) {
    add_option(general, "config", "FILE", "YAML file of knobs; flags win over it");
    add_option(general, "print-config", "", "prints the configuration in effect as YAML and ends");
  }
  for (const CommandOption& option : subcommand.options) {
    add_option(general, std::string(option.name), std::string(option.value_name),
               std::string(option.help));
  }
  groups.push_back(general);

  const RunConfig defaults;
  for (const FieldGroup group : kGroups) {
    if (!accepts(subcommand, group)) continue;
    po::options_description options(std::string(heading(group)), kHelpColumns);
    for_each_run_field(defaults, [&](const RunField& field, const auto& value) {
      if (field.group != group) return;
      add_option(options, flag_of(field.name).substr(2), value_name(field, value),
                 described(field, value));
    });
    groups.push_back(options);
  }
  return groups;
}

/// The knob a flag belongs to, as a setting; false when the flag is not a knob.
bool add_knob(const std::string& flag, const std::string& text, TypedOptions& typed) {
  const RunConfig defaults;
  bool is_knob = false;
  for_each_run_field(defaults, [&](const RunField& field, const auto& value) {
    if (flag_of(field.name) != flag) return;
    using Value = std::remove_cvref_t<decltype(value)>;
    is_knob = true;
    std::vector<ScalarText> items{{text, false}};
    if constexpr (kIsList<Value>) items = split_list(text);
    if (std::is_same_v<Value, bool> && text.empty()) items.front().text = "true";
    typed.knobs.push_back({std::string(field.name), flag, kIsList<Value>, std::move(items)});
  });
  return is_knob;
}

void add_typed(const Subcommand& subcommand, const std::string& flag, const std::string& text,
               TypedOptions& typed) {
  if (flag == "--help") {
    typed.wants_help = true;
  } else if (flag == "--print-config") {
    typed.wants_config = true;
  } else if (flag == "--config") {
    require(!text.empty(), "--config: expected a file name, got ''");
    typed.config_file = text;
  } else if (!add_knob(flag, text, typed)) {
    for (const CommandOption& option : subcommand.options) {
      require(flag.substr(2) != option.name || option.value_name.empty() || !text.empty(), flag,
              ": expected ", option.value_name, ", got ''");
    }
    typed.options[flag.substr(2)] = text;
  }
}

/// An unknown flag: a knob this subcommand does not take, or a slip of the hand.
std::string unknown_flag(const Subcommand& subcommand, const std::string& flag,
                         const po::options_description& known) {
  std::vector<std::string> flags;
  for (const auto& option : known.options()) flags.push_back("--" + option->long_name());
  for (const std::string& key : knob_names()) {
    if (flag_of(key) == flag) return fmt::format("{}: not an option of {}", flag, subcommand.name);
  }
  return fmt::format("{}: unknown option{}", flag, suggestion(flag, flags));
}

}  // namespace

TypedOptions parse_options(const Subcommand& subcommand,
                           const std::vector<std::string>& arguments) {
  po::options_description known;
  for (const auto& group : describe(subcommand)) known.add(group);
  using namespace po::command_line_style;
  constexpr int style = allow_long | long_allow_adjacent | long_allow_next;

  TypedOptions typed;
  try {
    const auto parsed = po::command_line_parser(arguments).options(known).style(style).run();
    std::set<std::string> seen;
    for (const auto& option : parsed.options) {
      require(option.position_key < 0, "unexpected argument '",
              option.value.empty() ? "" : option.value.front(), "' (options begin with --)");
      const std::string flag = "--" + option.string_key;
      require(seen.insert(flag).second, flag, ": given twice");
      add_typed(subcommand, flag, option.value.empty() ? "" : option.value.front(), typed);
    }
  } catch (const po::unknown_option& error) {
    const std::string typed_name = error.get_option_name();
    throw InvalidArgument(
        unknown_flag(subcommand, typed_name.substr(0, typed_name.find('=')), known));
  } catch (const po::invalid_command_line_syntax& error) {
    const bool is_empty = error.kind() == po::invalid_syntax::empty_adjacent_parameter;
    throw InvalidArgument(is_empty ? error.get_option_name() + ": expected a value after ="
                                   : std::string(error.what()));
  } catch (const po::error& error) {
    throw InvalidArgument(error.what());
  }
  return typed;
}

std::string help_text(const Subcommand& subcommand) {
  std::ostringstream text;
  text << "cpattn " << subcommand.name << " - " << subcommand.summary << "\n\nUsage: cpattn "
       << subcommand.name << " [options]\n";
  for (const auto& group : describe(subcommand)) text << "\n" << group;
  text << "\nExample:\n  " << subcommand.example << "\n";
  return text.str();
}

}  // namespace cpattn
