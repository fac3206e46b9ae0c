#include "cp/gradient_plan.h"

#include <algorithm>
#include <numeric>

#include "cp/gradient_binding.h"
#include "cp/step_images.h"
#include "src/base/digest.h"
#include "src/base/error.h"
#include "src/comm/direct_exchange.h"
#include "src/comm/ring_exchange.h"

namespace cpattn {
namespace {

std::size_t largest(const std::vector<std::size_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

const Shard& shard_of(const Plan& plan, int rank) {
  return plan.sharding().shards[static_cast<std::size_t>(rank)];
}

/// Ranks that would cut messages at other places are told apart, whatever made them differ.
std::string layout_lines(const Plan& plan, const std::vector<std::size_t>& span_bytes) {
  const GradientKernels& kernels = plan.kernels().gradient;
  Digest spans, pieces;
  for (const std::size_t bytes : span_bytes) spans.add(static_cast<std::int64_t>(bytes));
  for (const Shard& shard : plan.sharding().shards) {
    for (const OwnedChunk& chunk : shard.kv) {
      pieces.add(static_cast<std::int64_t>(
          kernels.dkv_slot_bytes(plan.kernel_problem(), chunk.num_tokens)));
    }
  }
  return detail::concat(std::hex, "gradient_spans=", spans.value(),
                        "\ngradient_pieces=", pieces.value(), "\n");
}

}  // namespace

GradientPlan::GradientPlan(const Plan& plan) {
  require<Unsupported>(plan.kernels().gradient.backward != nullptr, "kernels ", plan.kernels().name,
                       " have no backward");
  schedule_ = make_gradient_schedule(plan.problem().batch, plan.sharding(), plan.config(),
                                     plan.rank(), num_ring_steps(plan.reach()));
  lay_out_inputs(plan);
  lay_out_sums(plan);
  count_memory(plan);
  agreement_lines_ = plan.agreement_lines() + layout_lines(plan, ring_.span_bytes());
}

void GradientPlan::lay_out_inputs(const Plan& plan) {
  const GradientKernels& kernels = plan.kernels().gradient;
  const KernelProblem facts = plan.kernel_problem();
  ring_ =
      RingLayout(plan.sharding(), plan.reach(), plan.rank(), plan.schedule().direction,
                 [&](std::int64_t num_keys) { return kernels.packed_kv_bytes(facts, num_keys); });
  for (const Shard& shard : plan.sharding().shards) {
    for (const OwnedChunk& chunk : shard.kv)
      limits_.block_keys = std::max(limits_.block_keys, chunk.num_tokens);
    limits_.keys = std::max(limits_.keys, shard.kv_rows);
    limits_.kv_blocks = std::max(limits_.kv_blocks, static_cast<std::int64_t>(shard.kv.size()));
  }
  limits_.q_blocks = static_cast<std::int64_t>(plan.shard().q.size());
  for (const OwnedChunk& chunk : plan.shard().q) {
    query_offsets_.push_back(memory_.queries);
    memory_.queries += kernels.packed_query_bytes(facts, chunk.num_tokens);
  }
}

void GradientPlan::lay_out_sums(const Plan& plan) {
  for (const OwnedChunk& chunk : plan.shard().kv) {
    carried_offsets_.push_back(memory_.carried_dkv);
    dkv_bytes_.push_back(
        plan.kernels().gradient.dkv_slot_bytes(plan.kernel_problem(), chunk.num_tokens));
    const std::int32_t slots = schedule_.carried_dkv[dkv_bytes_.size() - 1];
    memory_.carried_dkv += static_cast<std::size_t>(slots) * dkv_bytes_.back();
  }
  for (const GradientStep& step : schedule_.steps) lay_out_step(plan, step);
}

// Pieces of all chunks one after the other, each chunk's in the order of its places: the owner
// knows their number, so both ends know where each is.
void GradientPlan::lay_out_step(const Plan& plan, const GradientStep& step) {
  const bool is_own = step.pieces_from < 0;
  std::vector<DkvPlace> places;
  std::size_t message = 0, work = 0;
  for (std::size_t j = 0; j < step.kv.size(); ++j) {
    const std::size_t bytes = plan.kernels().gradient.dkv_slot_bytes(
        plan.kernel_problem(), shard_of(plan, step.kv_owner).kv[j].num_tokens);
    for (std::int32_t k = 0; k < step.kv[j].num_places; ++k) {
      if (k >= step.kv[j].num_pieces) {
        places.push_back({DkvArea::work, work});
        work += bytes;
      } else if (is_own) {
        places.push_back(
            {DkvArea::carried, carried_offsets_[j] + static_cast<std::size_t>(k) * bytes});
      } else {
        places.push_back({DkvArea::message, message});
        message += bytes;
      }
    }
  }
  std::size_t arriving = 0;
  for (std::size_t j = 0; j < step.arriving.size(); ++j)
    arriving += static_cast<std::size_t>(step.arriving[j]) * dkv_bytes_[j];
  places_.push_back(std::move(places));
  bytes_out_.push_back(message);
  bytes_in_.push_back(arriving);
  memory_.work_dkv = std::max(memory_.work_dkv, work);
}

void GradientPlan::count_memory(const Plan& plan) {
  const GradientKernels& kernels = plan.kernels().gradient;
  memory_.ring_slots = RingExchange::workspace_bytes(ring_.bytes());
  memory_.carried_dq = static_cast<std::size_t>(schedule_.num_dq_slots) *
                       kernels.dq_slot_bytes(plan.kernel_problem());
  memory_.messages = DirectExchange::workspace_bytes(max_bytes_out(), max_bytes_in());
  memory_.workspace = kernels.workspace_bytes(plan.kernel_problem(), limits_);
  std::byte anywhere{};  // sizes do not depend on addresses
  const auto at_any_step = [&](std::size_t) { return &anywhere; };
  memory_.images =
      StepImages::size_bytes(GradientBinding(plan, *this, {&anywhere, &anywhere, &anywhere})
                                 .make_images(at_any_step, at_any_step));
}

std::size_t GradientPlan::max_bytes_out() const { return largest(bytes_out_); }
std::size_t GradientPlan::max_bytes_in() const { return largest(bytes_in_); }

std::size_t GradientPlan::bytes_on_wire() const {
  return std::accumulate(bytes_out_.begin(), bytes_out_.end(), ring_.bytes_sent());
}

}  // namespace cpattn
