#include "cp/ring_attention.h"

#include "cp/ring_setup.h"
#include "cp/tensor_check.h"

namespace cpattn {
namespace {

TensorView<float, 2> one_row(const TensorView<float, 1>& view) {
  return {view.data, {1, view.shape[0]}, {view.shape[0], 1}};
}

std::string problems_with(const Plan& plan, const ForwardTensors& tensors, const Device& device) {
  const AttentionShape& shape = plan.problem().shape;
  const DType dtype = plan.problem().dtype;
  const std::int64_t q_rows = plan.shard().q_rows, kv_rows = plan.shard().kv_rows;
  TensorCheck check(device);
  check.tensor("q", tensors.q, {dtype}, q_rows, shape.num_heads, shape.head_dim);
  check.tensor("k", tensors.k, {dtype}, kv_rows, shape.num_kv_heads, shape.head_dim);
  check.tensor("v", tensors.v, {dtype}, kv_rows, shape.num_kv_heads, shape.value_dim);
  check.tensor("out", tensors.out, {plan.problem().out_dtype}, q_rows, shape.num_heads,
               shape.value_dim);
  const auto& lse = tensors.lse;
  check.matrix("lse", {lse.data, lse.shape, lse.strides}, q_rows, shape.num_heads);
  check.vector("head_maxima", tensors.head_maxima, shape.num_heads);
  check.separate({{"out", rows_of(tensors.out)},
                  {"lse", rows_of(lse)},
                  {"head_maxima", rows_of(one_row(tensors.head_maxima))}},
                 {{"q", rows_of(tensors.q)}, {"k", rows_of(tensors.k)}, {"v", rows_of(tensors.v)}});
  return check.problems();
}

}  // namespace

RingAttention::RingAttention(const Plan& plan, ShardTransport& transport)
    : plan_(plan),
      transport_(agreed(plan, plan.agreement_lines(), transport)),
      exchange_(transport, plan.ring().bytes(), ring_options(plan)),
      carried_(transport.device().allocate(plan.memory().carried)),
      workspace_(transport.device().allocate(plan.memory().workspace)),
      own_chunks_(pack_chunks(plan.shard().kv, plan.ring().offsets(plan.rank()))),
      binding_(plan),
      images_(binding_.make_images(
                  [this](std::size_t step) { return exchange_.at_step(static_cast<int>(step)); }),
              transport.device()) {}

// Our kv shard leaves for the next rank while we compute on it. On the CPU the kernels poll the
// exchange between tiles; on a GPU all of this is put into the order of streams. What is computed,
// merged and finished in a step was decided by cp/schedule.
void RingAttention::forward(const ForwardTensors& tensors, Stream stream) {
  refuse_tensors_together(plan_, Pass::forward, transport_,
                          problems_with(plan_, tensors, transport_.device()), stream);
  const CurrentDevice current(transport_.device());
  exchange_.reset();
  pack_own(tensors, stream);
  for (std::size_t step = 0; step < plan_.schedule().steps.size(); ++step) {
    exchange_.post(stream);
    run_step(step, tensors, stream);
    exchange_.wait(stream);
  }
}

void RingAttention::run_step(std::size_t step, const ForwardTensors& tensors, Stream stream) {
  binding_.bind(step, exchange_.current().data());
  plan_.kernels().forward(
      {.problem = plan_.kernel_problem(),
       .q = tensors.q,
       .out = tensors.out,
       .lse = tensors.lse,
       .kv_blocks = binding_.kv_blocks(),
       .programs = binding_.programs(),
       .carried = carried_.data(),
       .workspace = workspace_.data(),
       .limits = plan_.limits(),
       .progress = {[](void* exchange) noexcept { static_cast<RingExchange*>(exchange)->poll(); },
                    &exchange_},
       .stream = stream,
       .image = images_.at(step),
       .head_maxima = tensors.head_maxima.data});
}

void RingAttention::pack_own(const ForwardTensors& tensors, Stream stream) {
  plan_.kernels().pack_kv({.problem = plan_.kernel_problem(),
                           .k = tensors.k,
                           .v = tensors.v,
                           .chunks = own_chunks_,
                           .packed = exchange_.own().data(),
                           .stream = stream});
}

}  // namespace cpattn
