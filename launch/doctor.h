// `cpattn doctor`: what this machine has, what will therefore work, and what to do about the rest.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "launch/cli.h"
#include "launch/machine.h"
#include "src/base/enum_names.h"

namespace cpattn {

/// ok: there. missing: needed and not there. limited: works, with less than one may expect. unused:
/// there or not, this version makes no use of it.
enum class FindingKind { ok, missing, limited, unused };

template <>
struct EnumNames<FindingKind> {
  static constexpr std::array kValues{NamedValue<FindingKind>{FindingKind::ok, "ok"},
                                      NamedValue<FindingKind>{FindingKind::missing, "missing"},
                                      NamedValue<FindingKind>{FindingKind::limited, "limited"},
                                      NamedValue<FindingKind>{FindingKind::unused, "unused"}};
};

struct Finding {
  FindingKind kind = FindingKind::ok;
  std::string part;    ///< "Open MPI"
  std::string found;   ///< what is there
  std::string remedy;  ///< one line; empty when nothing is to be done
};

/// Something one may want to do here.
struct Ability {
  std::string what;
  bool works = false;
  std::string why;
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<Ability> abilities;
  bool can_run_parity = false;  ///< on the CPU, with more than one rank
};

/// Pure: from facts to conclusions.
Diagnosis diagnose(const MachineFacts& facts);

std::string to_text(const Diagnosis& diagnosis);
std::string to_json(const Diagnosis& diagnosis);

/// The subcommand as the table in main() lists it.
Subcommand doctor_subcommand();

/// pass when CPU parity can run, unavailable otherwise.
int run_doctor(const RunConfig& config, const CommandLine& line);

}  // namespace cpattn
