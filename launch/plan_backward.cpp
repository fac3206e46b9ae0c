#include "launch/plan_backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "launch/plan_summary.h"

namespace cpattn {
namespace {

SumRange joined(const SumRange& a, const SumRange& b) {
  return {std::min(a.first, b.first), std::max(a.last, b.last)};
}

/// Follows the dk, dv sums of a step by what they cover.
std::vector<KvSummary> chunks_of(const Plan& plan, const GradientSchedule& schedule,
                                 const GradientStep& step) {
  const auto& kv = plan.sharding().shards[static_cast<std::size_t>(step.kv_owner)].kv;
  std::map<SlotIndex, SumRange> covers;
  std::vector<KvSummary> chunks(kv.size());
  for (std::int64_t i = step.task_begin; i < step.task_end; ++i) {
    const ScheduledTask& item = schedule.tasks[static_cast<std::size_t>(i)];
    const OwnedChunk& q = plan.shard().q[static_cast<std::size_t>(item.task.q_chunk)];
    const SumRange leaf{q.chunk, q.chunk};
    covers[item.task.dkv] = item.task.continues_dkv ? joined(covers[item.task.dkv], leaf) : leaf;
    for (std::int64_t s = item.dkv_sum_begin; s < item.dkv_sum_end; ++s) {
      const SumOp& sum = schedule.sums[static_cast<std::size_t>(s)];
      covers[sum.dst] = joined(covers[sum.left], covers[sum.right]);
    }
    chunks[static_cast<std::size_t>(item.task.kv_block)].q.push_back(chunk_name(plan.problem(), q));
  }
  for (std::size_t j = 0; j < kv.size(); ++j) {
    chunks[j].kv = chunk_name(plan.problem(), kv[j]);
    for (std::int32_t k = 0; k < step.kv[j].num_pieces; ++k)
      chunks[j].pieces.push_back(covers[step.kv[j].first_place + k]);
  }
  std::erase_if(chunks, [](const KvSummary& chunk) { return chunk.q.empty(); });
  return chunks;
}

}  // namespace

BackwardSummary summarize_backward(const GradientPlan& gradient) {
  const GradientSchedule& schedule = gradient.schedule();
  BackwardSummary summary;
  summary.num_tasks = static_cast<std::int64_t>(schedule.tasks.size());
  summary.num_sums = static_cast<std::int64_t>(schedule.sums.size()) +
                     std::count_if(schedule.folds.begin(), schedule.folds.end(),
                                   [](const FoldOp& op) { return op.kind == DkvOpKind::sum; });
  for (const GradientStep& step : schedule.steps) {
    if (step.pieces_from < 0) continue;
    for (const KvPlaces& places : step.kv) summary.num_pieces += places.num_pieces;
  }
  summary.bytes_on_wire = gradient.bytes_on_wire();
  summary.memory = gradient.memory();
  return summary;
}

std::vector<BackwardStepSummary> summarize_backward_steps(const Plan& plan,
                                                          const GradientPlan& gradient) {
  const GradientSchedule& schedule = gradient.schedule();
  std::vector<BackwardStepSummary> steps;
  for (std::size_t t = 0; t < schedule.steps.size(); ++t) {
    const GradientStep& step = schedule.steps[t];
    BackwardStepSummary& summary = steps.emplace_back();
    summary.kv_owner = step.kv_owner;
    summary.chunks = chunks_of(plan, schedule, step);
    summary.pieces_from = step.pieces_from;
    for (const KvPlaces& places : step.kv)
      summary.num_sent += step.pieces_from < 0 ? 0 : places.num_pieces;
    summary.num_received =
        std::accumulate(step.arriving.begin(), step.arriving.end(), std::int64_t{0});
    summary.bytes_out = gradient.bytes_out(t);
    summary.bytes_in = gradient.bytes_in(t);
    for (std::int64_t i = step.fold_begin; i < step.fold_end; ++i) {
      const FoldOp& op = schedule.folds[static_cast<std::size_t>(i)];
      if (op.kind != DkvOpKind::finish && op.kind != DkvOpKind::finish_empty) continue;
      summary.finished.push_back(
          chunk_name(plan.problem(), plan.shard().kv[static_cast<std::size_t>(op.kv_chunk)]));
    }
  }
  return steps;
}

std::string range_text(const SumRange& range) {
  return range.first == range.last ? fmt::format("[{}]", range.first)
                                   : fmt::format("[{}-{}]", range.first, range.last);
}

}  // namespace cpattn
