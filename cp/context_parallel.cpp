#include "cp/context_parallel.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "cp/ring_setup.h"
#include "cp/tensor_check.h"
#include "src/base/error.h"
#include "src/base/json_text.h"

namespace cpattn {
namespace {

/// The check that all ranks make together when a problem is planned.
constexpr std::string_view kPlanCheck = "plan check";

/// head_maxima of a head of which nothing was observed.
constexpr float kUnobserved = -std::numeric_limits<float>::infinity();

/// Every reason why this problem cannot run on this group.
std::vector<std::string> refusals_of(const Problem& problem, const CpConfig& config,
                                     const ShardTransport& transport) {
  const Communicator& group = transport.control();
  auto refusals = problems_with(problem, config, group.rank(), group.size());
  // Cutting is what the group was made for; a knob that is silently without effect is a trap.
  const auto limit = static_cast<std::int64_t>(group.max_message_bytes());
  const std::int64_t asked = config.max_message_bytes;
  if (limit != 0 && asked != limit && asked != CpConfig().max_message_bytes) {
    refusals.push_back(detail::concat("max_message_bytes is ", asked, ", expected ", limit,
                                      ", as this group of transport ", group.transport(),
                                      " was made with: set it there"));
  }
  if (config.verify_checksum && !transport.can_verify_checksums()) {
    refusals.push_back(detail::concat("verify_checksum is true, expected false: transport ",
                                      transport.transport(), " does not see the bytes it moves"));
  }
  return refusals;
}

/// The plan of this rank, or the same InvalidArgument on every rank when any of them cannot make
/// its own.
Plan planned_together(ShardTransport& transport, const CpConfig& config, const KernelTable& kernels,
                      const Problem& problem) {
  std::string refusal;
  for (const std::string& item : refusals_of(problem, config, transport))
    refusal += (refusal.empty() ? "" : "; ") + item;
  // A timeout that is itself refused cannot bound the wait for the others.
  const CpConfig usual;
  const double timeout = refusal.empty() ? config.timeout_seconds : usual.timeout_seconds;
  Communicator& group = transport.control();
  refuse_together(group, refusal, deadline_after(Seconds(timeout)), kPlanCheck);
  return Plan(problem, config, kernels, group.rank(), group.size());
}

/// A host can write them by itself, whenever.
Buffer unobserved_maxima(Device& device, std::int64_t num_heads) {
  if (device.kind() == DeviceKind::cpu) return {};
  const std::vector<float> values(static_cast<std::size_t>(num_heads), kUnobserved);
  Buffer there = device.allocate(values.size() * sizeof(float));
  device.upload(there.data(), std::as_bytes(std::span(values)));
  return there;
}

}  // namespace

// Destroyed from the bottom up: what reads the plan and the group goes before them.
struct PlannedAttention::State {
  std::shared_ptr<ShardTransport> group;
  Plan plan;
  RingAttention attention;
  std::unique_ptr<GradientPlan> gradient_plan;
  std::unique_ptr<RingGradient> gradient;
  std::unique_ptr<ShardRows> q_rows, kv_rows;
  Buffer unobserved;  // [Hq] of -inf on a GPU: what head_maxima is reset from

  State(std::shared_ptr<ShardTransport> ranks, const CpConfig& config, const KernelTable& kernels,
        const Problem& problem)
      : group(std::move(ranks)),
        plan(planned_together(*group, config, kernels, problem)),
        attention(plan, *group),
        unobserved(unobserved_maxima(group->device(), plan.problem().shape.num_heads)) {}
};

PlannedAttention::PlannedAttention(std::shared_ptr<ShardTransport> group, const CpConfig& config,
                                   const KernelTable& kernels, const Problem& problem) {
  require(group != nullptr, "group is null: expected a communicator or another transport");
  state_ = std::make_unique<State>(std::move(group), config, kernels, problem);
}

PlannedAttention::~PlannedAttention() = default;

const Plan& PlannedAttention::plan() const { return state_->plan; }

const GradientPlan& PlannedAttention::gradient_plan() const {
  if (!state_->gradient_plan) state_->gradient_plan = std::make_unique<GradientPlan>(plan());
  return *state_->gradient_plan;
}

Communicator& PlannedAttention::group() const { return state_->group->control(); }
ShardTransport& PlannedAttention::transport() const { return *state_->group; }

void PlannedAttention::forward(const ForwardTensors& tensors, Stream stream) {
  state_->attention.forward(tensors, stream);
}

void PlannedAttention::backward(const BackwardTensors& tensors, Stream stream) {
  require(state_->gradient != nullptr || !transport().device().is_capturing(stream), "rank ",
          group().rank(), ": stream: in capture, expected none until prepare_backward()");
  gradient().backward(tensors, stream);
}

void PlannedAttention::prepare_backward() { gradient(); }

RingGradient& PlannedAttention::gradient() {
  if (!state_->gradient)
    state_->gradient = std::make_unique<RingGradient>(plan(), gradient_plan(), transport());
  return *state_->gradient;
}

void PlannedAttention::reset_head_maxima(const TensorView<float, 1>& head_maxima, Stream stream) {
  const std::int64_t num_heads = plan().problem().shape.num_heads;
  Device& device = transport().device();
  TensorCheck check(device);
  check.vector("head_maxima", head_maxima, num_heads);
  require(head_maxima.data != nullptr, "rank ", group().rank(), ": head_maxima: null");
  require(check.problems().empty(), "rank ", group().rank(), ": ", check.problems());
  const std::string problem = device.problem_with(stream);
  require(problem.empty(), "rank ", group().rank(), ": ", problem);
  if (device.kind() == DeviceKind::cpu) {
    std::fill_n(head_maxima.data, num_heads, kUnobserved);
  } else {
    device.copy(reinterpret_cast<std::byte*>(head_maxima.data), state_->unobserved.bytes(), stream);
  }
}

const ShardRows& PlannedAttention::rows_of(ShardSide side, Stream stream) {
  const bool is_q = side == ShardSide::q;
  std::unique_ptr<ShardRows>& rows = is_q ? state_->q_rows : state_->kv_rows;
  if (!rows) {
    Device& device = transport().device();
    require(!device.is_capturing(stream), "rank ", group().rank(),
            ": stream: in capture, expected none until such rows were copied once");
    const Shard& shard = plan().shard();
    rows = std::make_unique<ShardRows>(is_q ? shard.q : shard.kv, plan().kernels(), device);
  }
  return *rows;
}

void PlannedAttention::shard_rows(ShardSide side, const AnyConstTensor& global,
                                  const AnyTensor& local, Stream stream) {
  rows_of(side, stream).shard(global, local, stream);
}

void PlannedAttention::unshard_rows(ShardSide side, const AnyConstTensor& local,
                                    const AnyTensor& global, Stream stream) {
  rows_of(side, stream).unshard(local, global, stream);
}

void PlannedAttention::refuse_forward(std::string_view why, Stream stream) {
  refuse_call(plan(), Pass::forward, transport(), why.empty() ? "refused" : why, stream);
}

void PlannedAttention::refuse_backward(std::string_view why, Stream stream) {
  if (!transport().device().is_capturing(stream)) gradient();  // what the others do first
  refuse_call(plan(), Pass::backward, transport(), why.empty() ? "refused" : why, stream);
}

ContextParallelAttention::ContextParallelAttention(std::shared_ptr<ShardTransport> group,
                                                   const CpConfig& config,
                                                   const KernelTable* kernels)
    : group_(std::move(group)),
      config_(config),
      kernels_(kernels != nullptr ? kernels : &default_kernels()) {
  require(group_ != nullptr, "group is null: expected a communicator");
}

std::unique_ptr<PlannedAttention> ContextParallelAttention::plan(const Problem& problem) const {
  return std::make_unique<PlannedAttention>(group_, config_, *kernels_, problem);
}

void ContextParallelAttention::refuse_plan(std::string_view why) const {
  refuse_together(group_->control(), why.empty() ? "refused" : why,
                  deadline_after(Seconds(CpConfig().timeout_seconds)), kPlanCheck);
}

Explanation ContextParallelAttention::explain(const Problem& problem) const {
  Explanation result;
  result.rank = group_->control().rank();
  result.world_size = group_->control().size();
  result.kernels = kernels_->name;
  result.numerics = kernels_->numerics(problem.dtype);
  result.transport = group_->transport();
  result.sharding = name_of(config_.sharding);
  result.schedule = name_of(config_.schedule);
  result.refusals = refusals_of(problem, config_, *group_);
  if (!result.refusals.empty()) return result;
  try {
    const Plan plan(problem, config_, *kernels_, result.rank, result.world_size);
    const GradientPlan gradient(plan);
    const MemoryPlan memory = plan.memory();
    result.guarantee = plan.guarantee();
    result.q_rows = plan.shard().q_rows;
    result.kv_rows = plan.shard().kv_rows;
    result.visible_pairs = plan.shard().visible_pairs;
    result.forward_memory_bytes = memory.own();
    result.backward_memory_bytes = gradient.memory_bytes();
    result.forward_bytes_on_wire = plan.bytes_on_wire();
    result.backward_bytes_on_wire = gradient.bytes_on_wire();
  } catch (const Error& error) {  // a refusal is an answer here
    result.refusals.emplace_back(error.what());
  }
  result.is_supported = result.refusals.empty();
  return result;
}

std::string Explanation::to_json() const {
  return JsonText()
      .add("is_supported", is_supported)
      .add("refusals", refusals)
      .add("rank", rank)
      .add("world_size", world_size)
      .add("kernels", kernels)
      .add("numerics", numerics)
      .add("transport", transport)
      .add("sharding", sharding)
      .add("schedule", schedule)
      .add("guarantee", guarantee)
      .add("q_rows", q_rows)
      .add("kv_rows", kv_rows)
      .add("visible_pairs", visible_pairs)
      .add("forward_memory_bytes", forward_memory_bytes)
      .add("backward_memory_bytes", backward_memory_bytes)
      .add("forward_bytes_on_wire", forward_bytes_on_wire)
      .add("backward_bytes_on_wire", backward_bytes_on_wire)
      .text();
}

}  // namespace cpattn
