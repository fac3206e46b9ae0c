#include "launch/plan_summary.h"

#include <fmt/format.h>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// More operations than this are not printed unless a rank is asked for.
constexpr std::int64_t kReadableOps = 200;

RankSummary summarize_rank(const Plan& plan) {
  const Shard& shard = plan.shard();
  RankSummary summary;
  summary.rank = plan.rank();
  summary.q = shard.q;
  summary.kv = shard.kv;
  summary.q_tokens = shard.q_rows;
  summary.kv_tokens = shard.kv_rows;
  summary.visible_pairs = shard.visible_pairs;
  for (const StateOp& op : plan.schedule().ops) {
    if (op.kind == StateOpKind::merge) ++summary.num_merges;
    if (op.kind == StateOpKind::block || op.kind == StateOpKind::accumulate) ++summary.num_blocks;
  }
  summary.bytes_on_wire = plan.bytes_on_wire();
  summary.packed_kv = plan.ring().span_bytes()[static_cast<std::size_t>(plan.rank())];
  summary.memory = plan.memory();
  return summary;
}

std::vector<LaunchTiles> launches_of(const Plan& plan) {
  const KernelTable& kernels = plan.kernels();
  if (kernels.launch_tiles == nullptr) return {};
  std::vector<LaunchTiles> launches{kernels.launch_tiles(plan.kernel_problem())};
  for (const LaunchTiles& launch : kernels.gradient.launch_tiles(plan.kernel_problem()))
    launches.push_back(launch);
  return launches;
}

double per_token(std::size_t bytes, std::int64_t tokens) {
  return tokens == 0 ? 0.0 : static_cast<double>(bytes) / static_cast<double>(tokens);
}

}  // namespace

double RankSummary::bytes_per_token() const { return per_token(memory.total(), num_tokens()); }

std::size_t RankSummary::own_memory() const {
  return memory.own() + (backward ? backward->memory.total() : 0);
}

double RankSummary::own_bytes_per_token() const { return per_token(own_memory(), num_tokens()); }

PlanSummary summarize_plan(const Problem& problem, const CpConfig& config,
                           const KernelTable& kernels, const std::string& input, int world_size,
                           std::optional<int> rank) {
  PlanSummary summary;
  summary.input = input;
  summary.problem = problem;
  summary.config = config;
  summary.world_size = world_size;
  summary.wanted_rank = rank;
  summary.kernels = kernels.name;
  summary.numerics = kernels.numerics(problem.dtype);

  // Every plan holds the sharding of all ranks, so only those that are shown are kept.
  std::int64_t num_ops = 0;
  for (int r = 0; r < world_size; ++r) {
    Plan plan(problem, config, kernels, r, world_size);
    summary.ranks.push_back(summarize_rank(plan));
    std::optional<GradientPlan> gradient;
    if (kernels.gradient.backward != nullptr) gradient.emplace(plan);
    if (gradient) summary.ranks.back().backward = summarize_backward(*gradient);
    num_ops += static_cast<std::int64_t>(plan.schedule().ops.size());
    if (r == 0) {
      summary.num_threads = plan.num_threads();
      summary.launches = launches_of(plan);
      summary.guarantee = plan.guarantee();
      summary.agreement_lines = plan.agreement_lines();
      summary.imbalance = plan.sharding().imbalance();
    }
    const bool is_readable = !rank && num_ops <= kReadableOps;
    if (!rank && !is_readable) {
      summary.detailed.clear();
      summary.detailed_backward.clear();
    }
    if (!is_readable && rank != r) continue;
    summary.detailed_backward.emplace_back();
    if (gradient) summary.detailed_backward.back() = summarize_backward_steps(plan, *gradient);
    summary.detailed.push_back(std::move(plan));
  }
  return summary;
}

std::string chunk_name(const Problem& problem, const OwnedChunk& chunk) {
  if (problem.batch.documents.size() > 1) {
    return fmt::format("d{}c{}", chunk.document, chunk.chunk);
  }
  return fmt::format("c{}", chunk.chunk);
}

std::string slot_name(SlotIndex slot) {
  return is_scratch(slot) ? fmt::format("t{}", scratch_number(slot)) : fmt::format("s{}", slot);
}

}  // namespace cpattn
