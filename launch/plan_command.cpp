#include "launch/plan_command.h"

#include <algorithm>
#include <iostream>
#include <optional>

#include "launch/cli_values.h"
#include "launch/machine.h"
#include "launch/plan_json.h"
#include "launch/plan_summary.h"
#include "launch/plan_text.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// The rank of --rank, below the largest size.
std::optional<int> wanted_rank(const RunConfig& config, const CommandLine& line) {
  if (!line.has("rank")) return std::nullopt;
  const auto largest = *std::max_element(config.cp.begin(), config.cp.end());
  const RunField field{{"rank", "", 0, static_cast<double>(largest - 1)}};
  std::int64_t rank = 0;
  try {
    parse_value(field, std::vector<ScalarText>{{line.value("rank"), false}}, rank);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(std::string("--rank: ") + error.what());
  }
  return static_cast<int>(rank);
}

/// What is known of the GPU at one size. InvalidArgument for what a run would refuse there.
GpuSummary gpu_summary(const PlannedGpu& gpu, const RunConfig& config, int world_size) {
  const PlannedExchange exchange = planned_exchange(config.exchange, gpu.num_gpus, world_size, [] {
    return mpi_cuda_awareness().value_or(false);
  });
  require(!config.cp_config.verify_checksum || exchange.can_verify_checksums,
          "verify_checksum is true, expected false: exchange ", exchange.name,
          " does not see the bytes it moves");
  return {gpu.compute_capability, gpu.multiprocessors, gpu.origin, exchange};
}

}  // namespace

Subcommand plan_subcommand() {
  return {"plan",
          "prints what a run would do, without running it",
          "cpattn plan --seq-len 40 --chunk-tokens 8 --cp 3 --rank 1",
          kPlanKnobs,
          {{"rank", "R", "prints all steps of this rank; default: of every rank when they are few"},
           {"json", "", "prints JSON"}},
          run_plan};
}

int run_plan(const RunConfig& config, const CommandLine& line) {
  const std::optional<int> rank = wanted_rank(config, line);
  std::optional<PlannedGpu> gpu;
  if (config.device != LaneDevice::cpu) gpu = planned_gpu(config);
  const KernelTable& kernels = gpu ? gpu->kernels : kernels_of(config);
  const bool wants_json = line.has("json");
  std::vector<PlanSummary> summaries;
  bool is_first = true;
  for (const auto& input : open_inputs(config)) {
    for (const LaneConfig& lane : lanes_of(config)) {
      const Problem problem = problem_of(config, lane, input->info());
      for (const std::int64_t size : config.cp) {
        PlanSummary summary = summarize_plan(problem, cp_config_of(config, lane), kernels,
                                             input->info().name, static_cast<int>(size), rank);
        if (gpu) summary.gpu = gpu_summary(*gpu, config, static_cast<int>(size));
        if (wants_json) {
          summaries.push_back(std::move(summary));
        } else {
          std::cout << (is_first ? "" : "\n") << plan_text(summary);
          is_first = false;
        }
      }
    }
  }
  if (wants_json) std::cout << plan_json(summaries);
  return static_cast<int>(ExitCode::pass);
}

}  // namespace cpattn
