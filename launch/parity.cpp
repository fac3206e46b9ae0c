#include "launch/parity.h"

#include <fmt/core.h>

#include <iostream>

#include "launch/compare.h"
#include "launch/faults.h"
#include "launch/parity_job.h"
#include "launch/parity_launcher.h"
#include "launch/world.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

int list_faults() {
  for (const auto& [kind, name] : EnumNames<FaultKind>::kValues) {
    std::cout << fmt::format("{:<27}{}\n", name, description_of(kind));
  }
  return static_cast<int>(ExitCode::pass);
}

}  // namespace

Subcommand parity_subcommand() {
  return {"parity",
          "compares every CP size with one rank, bit for bit, and with double precision",
          "cpattn parity --cp 1,2,4 --mask causal,full --dtype f32,bf16",
          kAllKnobs,
          {{"list-faults", "", "lists what --inject can plant, and ends"},
           {"job-dir", "DIR", "internal: where a rank that the launcher started delivers to"}},
          run_parity};
}

int run_parity(const RunConfig& config, const CommandLine& line) {
  if (line.has("list-faults")) return list_faults();
  require<InternalError>(has_ieee_semantics(),
                         "this build has lost NaN, infinity or denormals: no "
                         "comparison in it means anything");
  fault_from_option(config.inject);
  if (line.has("job-dir")) return run_job_rank(config, line.value("job-dir"));
  if (mpirun_world_size() > 0) return run_user_rank(config, line);
  return run_launcher(config);
}

}  // namespace cpattn
