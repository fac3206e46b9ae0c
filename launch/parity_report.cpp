// What the launcher and a rank under the user's mpirun share: checks before, report after.
#include <fmt/core.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <iostream>
#include <set>

#include "cp/plan.h"
#include "launch/cli_values.h"
#include "launch/faults.h"
#include "launch/output_file.h"
#include "launch/parity_launcher.h"
#include "launch/world.h"
#include "src/base/error.h"

namespace cpattn {

void require_fault_fits(const RunConfig& config, const Inputs& inputs) {
  const std::optional<FaultKind> fault = fault_from_option(config.inject);
  if (!fault) return;
  std::set<std::string_view> needs;
  for (const LaneSpec& spec : lane_specs(config, inputs.size())) {
    for (const std::int64_t cp : config.cp) {
      const InputInfo& info = inputs[static_cast<std::size_t>(spec.source)]->info();
      const std::string_view need =
          what_fault_needs(*fault, {spec.lane, config.direction, cp, info});
      if (need.empty()) return;
      needs.insert(need);
    }
  }
  std::string text;
  for (const std::string_view need : needs) text += (text.empty() ? "" : ", ") + std::string(need);
  throw InvalidArgument("inject: " + config.inject + " fits no lane of this run: it " + text);
}

void require_plans(const RunConfig& config, const Inputs& inputs) {
  for (const LaneSpec& spec : lane_specs(config, inputs.size())) {
    const InputInfo& info = inputs[static_cast<std::size_t>(spec.source)]->info();
    const Problem problem = problem_of(config, spec.lane, info);
    for (const std::int64_t cp : config.cp) {
      CpConfig cp_config = cp_config_of(config, spec.lane);
      cp_config.threads = threads_per_rank(cp_config.threads, static_cast<int>(cp));
      Plan(problem, cp_config, kernels_of(config), 0, static_cast<int>(cp));
    }
  }
}

ParityReport make_report(const RunConfig& config, const std::string& mpi_version) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  ParityReport report;
  report.chunk_tokens = config.cp_config.chunk_tokens;
  report.inject = config.inject;
  report.environment = {
      {"version", CP_VERSION},
      {"compiler", "g++-compatible " __VERSION__},
      {"isa", std::string(kernels_of(config).name)},
      {"cores", std::to_string(usable_cores())},
      {"threads", config.cp_config.threads == 0 ? "cores divided among the ranks"
                                                : std::to_string(config.cp_config.threads)},
      {"mpi", mpi_version},
      {"host", host.data()}};
  for_each_run_field(config, [&](const RunField& field, const auto& value) {
    report.config.emplace_back(field.name, format_value(value, ","));
  });
  return report;
}

void judge_fault(const RunConfig& config, ParityReport& report) {
  const std::optional<FaultKind> fault = fault_from_option(config.inject);
  if (!fault) return;
  const bool ends_a_rank =
      fault == FaultKind::rank_returns_early || fault == FaultKind::rank_never_answers;
  std::int64_t sites = 0;
  for (const LaneReport& lane : report.lanes) {
    for (const RankReceipt& rank : lane.ranks) sites += rank.fault_sites;
  }
  if (sites == 0 && !ends_a_rank) {
    report.reasons.push_back("the fault " + config.inject +
                             " found no place in these lanes: nothing was planted");
    report.failure = FailureKind::bad_input;
  } else if (report.passes()) {
    report.reasons.push_back("the fault " + config.inject +
                             " was planted and not seen: these inputs cannot show it");
    report.failure = FailureKind::differs;
  }
}

void require_reports_writable(const RunConfig& config) {
  require(config.report.empty() || config.report != config.junit, "junit: '", config.junit,
          "' is the file of report, expected another one");
  for (const std::string& path : {config.report, config.junit}) {
    if (!path.empty()) require_writable(path);
  }
}

int publish(const RunConfig& config, const ParityReport& report) {
  // Files first: whoever reads the table may leave early, and then it ends this process.
  std::exception_ptr failure;
  try {
    if (!config.report.empty()) write_atomically(config.report, report_json(report));
    if (!config.junit.empty()) write_atomically(config.junit, report_junit(report));
  } catch (...) {
    failure = std::current_exception();
  }
  std::cout << report_text(report) << std::flush;
  if (failure) std::rethrow_exception(failure);
  return static_cast<int>(report.exit_code());
}

}  // namespace cpattn
