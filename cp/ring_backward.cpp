#include "cp/ring_gradient.h"
#include "cp/ring_setup.h"
#include "cp/tensor_check.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

TransferOptions piece_options(const Plan& plan) {
  const RingOptions ring = ring_options(plan);
  // Delays of the two exchanges differ, so that a test meets both orders.
  const std::uint64_t seed = ring.delay_seed == 0 ? 0 : ring.delay_seed + 1;
  return {ring.timeout, ring.verify_checksum, seed};
}

std::string problems_with(const Plan& plan, const BackwardTensors& t, const Device& device) {
  const AttentionShape& shape = plan.problem().shape;
  const DType dtype = plan.problem().dtype, out_dtype = plan.problem().out_dtype;
  const std::int64_t q_rows = plan.shard().q_rows, kv_rows = plan.shard().kv_rows;
  const auto any = {DType::f32, DType::f16, DType::bf16};
  TensorCheck check(device);
  check.tensor("q", t.q, {dtype}, q_rows, shape.num_heads, shape.head_dim);
  check.tensor("k", t.k, {dtype}, kv_rows, shape.num_kv_heads, shape.head_dim);
  check.tensor("v", t.v, {dtype}, kv_rows, shape.num_kv_heads, shape.value_dim);
  check.tensor("out", t.out, {out_dtype}, q_rows, shape.num_heads, shape.value_dim);
  check.matrix("lse", t.lse, q_rows, shape.num_heads);
  check.tensor("dout", t.dout, {out_dtype, DType::f32}, q_rows, shape.num_heads, shape.value_dim);
  if (t.dlse.data != nullptr) check.matrix("dlse", t.dlse, q_rows, shape.num_heads);
  check.tensor("dq", t.dq, any, q_rows, shape.num_heads, shape.head_dim);
  check.tensor("dk", t.dk, any, kv_rows, shape.num_kv_heads, shape.head_dim);
  check.tensor("dv", t.dv, any, kv_rows, shape.num_kv_heads, shape.value_dim);
  check.separate({{"dq", rows_of(t.dq)}, {"dk", rows_of(t.dk)}, {"dv", rows_of(t.dv)}},
                 {{"q", rows_of(t.q)},
                  {"k", rows_of(t.k)},
                  {"v", rows_of(t.v)},
                  {"out", rows_of(t.out)},
                  {"lse", rows_of(t.lse)},
                  {"dout", rows_of(t.dout)},
                  {"dlse", rows_of(t.dlse)}});
  return check.problems();
}

}  // namespace

RingGradient::RingGradient(const Plan& plan, const GradientPlan& gradient,
                           ShardTransport& transport)
    : plan_(plan),
      gradient_(gradient),
      transport_(agreed(plan, gradient.agreement_lines(), transport)),
      ring_(transport, gradient.ring().bytes(), ring_options(plan)),
      pieces_(transport, gradient.max_bytes_out(), gradient.max_bytes_in(), piece_options(plan)),
      queries_(transport.device().allocate(gradient.memory().queries)),
      carried_dq_(transport.device().allocate(gradient.memory().carried_dq)),
      carried_dkv_(transport.device().allocate(gradient.memory().carried_dkv)),
      work_dkv_(transport.device().allocate(gradient.memory().work_dkv)),
      workspace_(transport.device().allocate(gradient.memory().workspace)),
      own_kv_(pack_chunks(plan.shard().kv, gradient.ring().offsets(plan.rank()))),
      own_q_(pack_chunks(plan.shard().q, gradient.query_offsets())),
      binding_(plan, gradient, {queries_.data(), carried_dkv_.data(), work_dkv_.data()}),
      images_(make_images(), transport.device()) {
  incoming_.resize(own_kv_.size());
  for (const GradientStep& step : gradient_.schedule().steps)
    folds_.reserve(static_cast<std::size_t>(step.fold_end - step.fold_begin));
}

/// Pieces leave after every step but the first.
std::vector<std::vector<std::byte>> RingGradient::make_images() {
  return binding_.make_images(
      [this](std::size_t step) { return ring_.at_step(static_cast<int>(step)); },
      [this](std::size_t step) { return pieces_.outgoing_at(static_cast<int>(step) + 1); });
}

// As in forward, our kv shard travels while we compute on it. What our queries add to dk, dv of the
// shard of a step leaves straight for its owner when the step is computed, and travels while the
// next one is; on the CPU the kernels poll both exchanges.
void RingGradient::backward(const BackwardTensors& tensors, Stream stream) {
  pieces_.rethrow();  // then the ring may have been left in the middle of a hop
  refuse_tensors_together(plan_, Pass::backward, transport_,
                          problems_with(plan_, tensors, transport_.device()), stream);
  const CurrentDevice current(transport_.device());
  ring_.reset();
  pieces_.reset();
  pack_own(tensors, stream);
  const std::size_t num_steps = gradient_.schedule().steps.size();
  for (std::size_t step = 0; step < num_steps; ++step) {
    ring_.post(stream);
    run_tasks(step, tensors, stream);
    if (step > 0) {
      fold_pieces(step - 1, tensors, stream);
      send_pieces(step, stream);
    }
    ring_.wait(stream);
  }
  fold_pieces(num_steps - 1, tensors, stream);
}

void RingGradient::run_tasks(std::size_t step, const BackwardTensors& tensors, Stream stream) {
  binding_.bind(step, ring_.current().data(), pieces_.outgoing().data());
  if (binding_.tasks().empty()) return;
  plan_.kernels().gradient.backward({.problem = plan_.kernel_problem(),
                                     .q_blocks = binding_.q_blocks(),
                                     .kv_blocks = binding_.kv_blocks(),
                                     .tasks = binding_.tasks(),
                                     .dq_slots = carried_dq_.data(),
                                     .dkv_slots = binding_.dkv_slots(),
                                     .dq = tensors.dq,
                                     .workspace = workspace_.data(),
                                     .limits = gradient_.limits(),
                                     .progress = progress(),
                                     .stream = stream,
                                     .image = images_.at(step)});
}

void RingGradient::send_pieces(std::size_t step, Stream stream) {
  const GradientStep& now = gradient_.schedule().steps[step];
  pieces_.post({.step = static_cast<int>(step),
                .to = now.kv_owner,
                .bytes_out = gradient_.bytes_out(step),
                .from = now.pieces_from,
                .bytes_in = gradient_.bytes_in(step)},
               stream);
}

void RingGradient::fold_pieces(std::size_t step, const BackwardTensors& tensors, Stream stream) {
  const GradientSchedule& schedule = gradient_.schedule();
  const GradientStep& now = schedule.steps[step];
  if (step > 0) {
    pieces_.wait(stream);
    const std::byte* next = pieces_.incoming().data();
    for (std::size_t j = 0; j < now.arriving.size(); ++j) {
      incoming_[j] = next;
      next += static_cast<std::size_t>(now.arriving[j]) * gradient_.dkv_bytes(j);
    }
  }
  if (now.fold_begin == now.fold_end) return;
  folds_.clear();
  for (std::int64_t i = now.fold_begin; i < now.fold_end; ++i) {
    const FoldOp& op = schedule.folds[static_cast<std::size_t>(i)];
    folds_.push_back({op.kind, op.kv_chunk, fold_place(op, op.dst), fold_place(op, op.left),
                      fold_place(op, op.right)});
  }
  plan_.kernels().gradient.sum_dkv({.problem = plan_.kernel_problem(),
                                    .chunks = own_kv_,
                                    .ops = folds_,
                                    .dk = tensors.dk,
                                    .dv = tensors.dv,
                                    .progress = progress(),
                                    .stream = stream});
}

/// What arrived is only ever read.
std::byte* RingGradient::fold_place(const FoldOp& op, SlotIndex slot) const {
  const auto chunk = static_cast<std::size_t>(op.kv_chunk);
  const std::size_t bytes = gradient_.dkv_bytes(chunk);
  if (is_scratch(slot)) {
    return const_cast<std::byte*>(incoming_[chunk]) +
           static_cast<std::size_t>(scratch_number(slot)) * bytes;
  }
  return carried_dkv_.data() + gradient_.carried_offset(chunk) +
         static_cast<std::size_t>(slot) * bytes;
}

ProgressHook RingGradient::progress() {
  return {[](void* self) noexcept {
            static_cast<RingGradient*>(self)->ring_.poll();
            static_cast<RingGradient*>(self)->pieces_.poll();
          },
          this};
}

void RingGradient::pack_own(const BackwardTensors& tensors, Stream stream) {
  const GradientKernels& kernels = plan_.kernels().gradient;
  kernels.pack_kv({.problem = plan_.kernel_problem(),
                   .k = tensors.k,
                   .v = tensors.v,
                   .chunks = own_kv_,
                   .packed = ring_.own().data(),
                   .stream = stream});
  kernels.pack_queries({.problem = plan_.kernel_problem(),
                        .q = tensors.q,
                        .out = tensors.out,
                        .dout = tensors.dout,
                        .lse = tensors.lse,
                        .dlse = tensors.dlse,
                        .chunks = own_q_,
                        .packed = queries_.data(),
                        .stream = stream});
  for (const std::int32_t q : gradient_.schedule().unseeing_q) {
    const OwnedChunk& rows = plan_.shard().q[static_cast<std::size_t>(q)];
    kernels.zero_rows({.tensor = tensors.dq,
                       .row_begin = rows.local_begin,
                       .num_rows = rows.num_tokens,
                       .stream = stream});
  }
}

}  // namespace cpattn
