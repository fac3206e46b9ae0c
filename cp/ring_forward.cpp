#include "cp/ring_attention.h"

#include "cp/ring_setup.h"
#include "cp/tensor_check.h"

namespace cpattn {
namespace {

std::string problems_with(const Plan& plan, const ForwardTensors& tensors) {
  const AttentionShape& shape = plan.problem().shape;
  const DType dtype = plan.problem().dtype;
  const std::int64_t q_rows = plan.shard().q_rows, kv_rows = plan.shard().kv_rows;
  TensorCheck check;
  check.tensor("q", tensors.q, {dtype}, q_rows, shape.num_heads, shape.head_dim);
  check.tensor("k", tensors.k, {dtype}, kv_rows, shape.num_kv_heads, shape.head_dim);
  check.tensor("v", tensors.v, {dtype}, kv_rows, shape.num_kv_heads, shape.value_dim);
  check.tensor("out", tensors.out, {plan.problem().out_dtype}, q_rows, shape.num_heads,
               shape.value_dim);
  const auto& lse = tensors.lse;
  check.matrix("lse", {lse.data, lse.shape, lse.strides}, q_rows, shape.num_heads);
  check.separate({{"out", rows_of(tensors.out)}, {"lse", rows_of(lse)}},
                 {{"q", rows_of(tensors.q)}, {"k", rows_of(tensors.k)}, {"v", rows_of(tensors.v)}});
  return check.problems();
}

}  // namespace

RingAttention::RingAttention(const Plan& plan, Communicator& comm)
    : plan_(plan),
      comm_(agreed(plan, plan.agreement_lines(), comm)),
      exchange_(comm, plan.span_bytes(), ring_options(plan)),
      carried_(plan.memory().carried),
      workspace_(plan.memory().workspace) {
  const std::vector<OwnedChunk>& own = plan.shard().kv;
  for (std::size_t i = 0; i < own.size(); ++i) {
    own_chunks_.push_back({own[i].local_begin, own[i].num_tokens, plan.kv_offsets(plan.rank())[i]});
  }
  kv_blocks_.reserve(static_cast<std::size_t>(plan.limits().blocks));
  programs_.reserve(plan.shard().q.size());
}

// Our kv shard leaves for the next rank while we compute on it; the kernels poll the exchange
// between tiles. What is computed, merged and finished in a step was decided by cp/schedule.
void RingAttention::forward(const ForwardTensors& tensors) {
  refuse_tensors_together(plan_, comm_, problems_with(plan_, tensors));
  exchange_.reset();
  pack_own(tensors);
  for (const Step& step : plan_.schedule().steps) {
    exchange_.post();
    run_step(step, tensors);
    exchange_.wait();
  }
}

void RingAttention::run_step(const Step& step, const ForwardTensors& tensors) {
  const std::vector<OwnedChunk>& arrived =
      plan_.sharding().shards[static_cast<std::size_t>(step.kv_owner)].kv;
  const std::vector<std::size_t>& offsets = plan_.kv_offsets(step.kv_owner);
  kv_blocks_.clear();
  for (std::size_t i = 0; i < arrived.size(); ++i) {
    kv_blocks_.push_back({exchange_.current().data() + offsets[i], arrived[i].num_tokens});
  }
  programs_.clear();
  const std::span<const StateOp> ops(plan_.schedule().ops);
  for (const ChunkProgram& program : step.programs) {
    const OwnedChunk& q = plan_.shard().q[static_cast<std::size_t>(program.q_chunk)];
    programs_.push_back({q.local_begin, q.num_tokens,
                         ops.subspan(static_cast<std::size_t>(program.op_begin),
                                     static_cast<std::size_t>(program.op_end - program.op_begin))});
  }
  plan_.kernels().forward(
      {.problem = plan_.kernel_problem(),
       .q = tensors.q,
       .out = tensors.out,
       .lse = tensors.lse,
       .kv_blocks = kv_blocks_,
       .programs = programs_,
       .carried = carried_.data(),
       .workspace = workspace_.data(),
       .limits = plan_.limits(),
       .progress = {[](void* exchange) noexcept { static_cast<RingExchange*>(exchange)->poll(); },
                    &exchange_}});
}

void RingAttention::pack_own(const ForwardTensors& tensors) {
  plan_.kernels().pack_kv({.problem = plan_.kernel_problem(),
                           .k = tensors.k,
                           .v = tensors.v,
                           .chunks = own_chunks_,
                           .packed = exchange_.own().data()});
}

}  // namespace cpattn
