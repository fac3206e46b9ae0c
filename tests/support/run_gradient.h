// Runs forward and backward of one document on one KernelTable without any rank: the kernels'
// contract, nothing of cp/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/device/memory.h"
#include "tests/support/gradient_oracle.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {

/// How a backward is cut and run. Chunk lengths of 0: everything in one.
struct GradientRun {
  std::int64_t row_chunk = 0;
  std::int64_t key_chunk = 0;
  int num_threads = 1;
  DType gradient_dtype = DType::f32;
  bool keys_outermost = false;  ///< order of the tasks; sums keep theirs
  bool continues = false;       ///< order-free: add to the slots instead of summing leaves
  ProgressHook progress = {};
};

struct Gradients {
  HostTensor dq, dk, dv;
};

class GradientRunner {
 public:
  GradientRunner(const KernelTable& table, const GradientInputs& in, const GradientRun& run = {})
      : table_(table), in_(in), run_(run) {
    row_chunks_ = cut(in.rows(), run.row_chunk);
    key_chunks_ = cut(in.keys(), run.key_chunk);
    problem_ = {.shape = in.shape,
                .dtype = in.q.dtype(),
                .max_chunk_rows = row_chunks_.empty() ? 1 : row_chunks_.front().num_keys,
                .num_threads = run.num_threads};
    forward();
    pack();
    make_tasks();
    result_ = {HostTensor(run.gradient_dtype, in.q.shape()),
               HostTensor(run.gradient_dtype, in.k.shape()),
               HostTensor(run.gradient_dtype, in.v.shape())};
  }

  const HostTensor& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }
  Gradients& result() { return result_; }

  /// What would be passed to backward(); tests change it to see it refused.
  BackwardArgs args() {
    return {.problem = problem_,
            .q_blocks = q_blocks_,
            .kv_blocks = kv_blocks_,
            .tasks = tasks_,
            .dq_slots = dq_slots_.data(),
            .dkv_slots = dkv_slots_,
            .dq = result_.dq.view(),
            .workspace = workspace_.data(),
            .limits = limits_,
            .progress = run_.progress,
            .stream = tested().stream,
            .image = image_.data()};
  }
  PackQueriesArgs pack_args() {
    const GradientInputs& in = in_;
    const HostTensor& out = out_;
    return {
        .problem = problem_,
        .q = in.q.view(),
        .out = out.view(),
        .dout = in.dout.view(),
        .lse = {lse_.data(), {in.rows(), heads()}, {heads(), 1}},
        .dlse = {in.dlse.empty() ? nullptr : in.dlse.data(), {in.rows(), heads()}, {heads(), 1}},
        .chunks = query_places_,
        .packed = packed_queries_.data(),
        .stream = tested().stream};
  }
  SumDkvArgs sum_args() {
    return {.problem = problem_,
            .chunks = key_chunks_,
            .ops = finishes_,
            .dk = result_.dk.view(),
            .dv = result_.dv.view(),
            .progress = run_.progress,
            .stream = tested().stream};
  }

  const Gradients& backward() {
    image_ = image_of(table_.gradient.step_image, args());
    table_.gradient.backward(args());
    table_.gradient.sum_dkv(sum_args());
    return result_;
  }

 private:
  static std::vector<PackChunk> cut(std::int64_t count, std::int64_t length) {
    std::vector<PackChunk> chunks;
    if (length == 0) length = std::max<std::int64_t>(count, 1);
    for (std::int64_t first = 0; first < count; first += length)
      chunks.push_back({first, std::min(length, count - first), 0});
    return chunks;
  }

  std::int64_t heads() const { return in_.shape.num_heads; }

  void forward() {
    const std::int64_t rows = in_.rows(), keys = in_.keys();
    out_ = HostTensor(in_.out_dtype, {rows, heads(), in_.shape.value_dim});
    lse_.assign(static_cast<std::size_t>(rows * heads()), kNan);
    KernelProblem problem = problem_;
    problem.max_chunk_rows = std::max<std::int64_t>(rows, 1);
    Buffer packed(table_.packed_kv_bytes(problem, keys));
    const PackChunk all{0, keys, 0};
    table_.pack_kv({.problem = problem,
                    .k = in_.k.view(),
                    .v = in_.v.view(),
                    .chunks = {&all, 1},
                    .packed = packed.data(),
                    .stream = tested().stream});
    const SlotIndex slot = scratch_slot(0);
    const StateOp ops[] = {
        {.kind = StateOpKind::block, .dst = slot, .kv_block = 0, .mask = in_.mask},
        {.kind = StateOpKind::finalize, .left = slot, .mask = {}}};
    const QueryProgram program{0, rows, ops};
    const KvBlock block{packed.data(), keys};
    const StepLimits limits{keys, 1, 1};
    Buffer workspace(table_.workspace_bytes(problem, limits));
    ForwardArgs args{.problem = problem,
                     .q = in_.q.view(),
                     .out = out_.view(),
                     .lse = {lse_.data(), {rows, heads()}, {heads(), 1}},
                     .kv_blocks = {&block, 1},
                     .programs = {&program, 1},
                     .workspace = workspace.data(),
                     .limits = limits,
                     .progress = {},
                     .stream = tested().stream};
    const Buffer image = image_of(table_.step_image, args);
    args.image = image.data();
    table_.forward(args);
  }

  void pack() {
    const GradientKernels& kernels = table_.gradient;
    std::vector<PackChunk> places = key_chunks_;
    std::size_t bytes = 0;
    for (PackChunk& chunk : places) {
      chunk.offset = bytes;
      bytes += kernels.packed_kv_bytes(problem_, chunk.num_keys);
    }
    packed_kv_ = Buffer(bytes);
    kernels.pack_kv({.problem = problem_,
                     .k = in_.k.view(),
                     .v = in_.v.view(),
                     .chunks = places,
                     .packed = packed_kv_.data(),
                     .stream = tested().stream});
    for (const PackChunk& chunk : places)
      kv_blocks_.push_back({packed_kv_.data() + chunk.offset, chunk.num_keys});

    query_places_ = row_chunks_;
    bytes = 0;
    for (PackChunk& chunk : query_places_) {
      chunk.offset = bytes;
      bytes += kernels.packed_query_bytes(problem_, chunk.num_keys);
    }
    packed_queries_ = Buffer(bytes);
    kernels.pack_queries(pack_args());
    for (const PackChunk& chunk : query_places_)
      q_blocks_.push_back({packed_queries_.data() + chunk.offset, chunk.row_begin, chunk.num_keys});

    bytes = 0;
    for (const PackChunk& chunk : key_chunks_)
      bytes += kernels.dkv_slot_bytes(problem_, chunk.num_keys);
    dkv_memory_ = Buffer(bytes);
    bytes = 0;
    for (const PackChunk& chunk : key_chunks_) {
      dkv_slots_.push_back(dkv_memory_.data() + bytes);
      bytes += kernels.dkv_slot_bytes(problem_, chunk.num_keys);
    }
    dq_slots_ = Buffer(q_blocks_.size() * kernels.dq_slot_bytes(problem_));
    limits_ = {in_.keys(), static_cast<std::int64_t>(kv_blocks_.size()),
               key_chunks_.empty() ? 0 : key_chunks_.front().num_keys,
               static_cast<std::int64_t>(q_blocks_.size())};
    workspace_ = Buffer(kernels.workspace_bytes(problem_, limits_));
  }

  BlockMask mask_of(std::int32_t q, std::int32_t kv) const {
    BlockMask mask = in_.mask;
    mask.first_row_limit += row_chunks_[static_cast<std::size_t>(q)].row_begin -
                            key_chunks_[static_cast<std::size_t>(kv)].row_begin;
    return mask;
  }

  /// Whether the pair is a task. A q chunk that sees nothing has one too, which makes its zeros.
  bool is_task(std::int32_t q, std::int32_t kv) const {
    const auto sees = [&](std::int32_t block) {
      return mask_of(q, block).visible_keys(row_chunks_[static_cast<std::size_t>(q)].num_keys - 1,
                                            key_chunks_[static_cast<std::size_t>(block)].num_keys) >
             0;
    };
    return sees(kv) || (kv == 0 && !sees(0));
  }

  /// Leaves are added up in ascending order of the other kind of chunk.
  void make_tasks() {
    const auto num_q = static_cast<std::int32_t>(q_blocks_.size());
    const auto num_kv = static_cast<std::int32_t>(kv_blocks_.size());
    const SlotIndex leaf = scratch_slot(0);
    for (SlotIndex slot = 0; slot < num_q; ++slot) dq_sums_.push_back({slot, slot, leaf});
    for (SlotIndex slot = 0; slot < num_kv; ++slot) dkv_sums_.push_back({slot, slot, leaf});
    std::vector<bool> has_dkv(kv_blocks_.size(), false);
    for (std::int32_t i = 0; i < num_q * num_kv; ++i) {
      const std::int32_t q = run_.keys_outermost ? i % num_q : i / num_kv;
      const std::int32_t kv = run_.keys_outermost ? i / num_q : i % num_kv;
      if (!is_task(q, kv)) continue;
      const bool has_dq = kv > 0;  // what a row sees is a prefix
      const auto block = static_cast<std::size_t>(kv);
      GradientTask task;
      task.q_chunk = q;
      task.kv_block = kv;
      task.mask = mask_of(q, kv);
      task.dq = has_dq && !run_.continues ? leaf : q;
      task.dkv = has_dkv[block] && !run_.continues ? leaf : kv;
      task.continues_dq = has_dq && run_.continues;
      task.continues_dkv = has_dkv[block] && run_.continues;
      if (task.dq == leaf) task.dq_sums = {&dq_sums_[static_cast<std::size_t>(q)], 1};
      if (task.dkv == leaf) task.dkv_sums = {&dkv_sums_[block], 1};
      if (kv + 1 == num_kv || !is_task(q, kv + 1)) task.dq_result = q;
      has_dkv[block] = true;
      tasks_.push_back(task);
    }
    for (std::int32_t kv = 0; kv < num_kv; ++kv) {
      const auto block = static_cast<std::size_t>(kv);
      finishes_.push_back({has_dkv[block] ? DkvOpKind::finish : DkvOpKind::finish_empty, kv,
                           nullptr, dkv_slots_[block], nullptr});
    }
  }

  const KernelTable& table_;
  const GradientInputs& in_;  ///< must outlive this
  GradientRun run_;
  KernelProblem problem_;
  std::vector<PackChunk> row_chunks_, key_chunks_, query_places_;
  HostTensor out_;
  std::vector<float> lse_;
  Buffer packed_kv_, packed_queries_, dkv_memory_, dq_slots_, workspace_, image_;
  std::vector<KvBlock> kv_blocks_;
  std::vector<QueryBlock> q_blocks_;
  std::vector<std::byte*> dkv_slots_;
  std::vector<SumOp> dq_sums_, dkv_sums_;
  std::vector<GradientTask> tasks_;
  std::vector<DkvOp> finishes_;
  GradientLimits limits_;
  Gradients result_;
};

inline Gradients run_gradient(const KernelTable& table, const GradientInputs& in,
                              const GradientRun& run = {}) {
  return GradientRunner(table, in, run).backward();
}

/// Standard normal inputs; `mask` as it is.
inline GradientInputs random_gradient_inputs(const AttentionShape& shape, std::int64_t rows,
                                             std::int64_t keys, BlockMask mask, DType dtype,
                                             std::uint64_t seed) {
  GradientInputs in{.shape = shape,
                    .mask = mask,
                    .out_dtype = dtype,
                    .q = HostTensor(dtype, {rows, shape.num_heads, shape.head_dim}),
                    .k = HostTensor(dtype, {keys, shape.num_kv_heads, shape.head_dim}),
                    .v = HostTensor(dtype, {keys, shape.num_kv_heads, shape.value_dim}),
                    .dout = HostTensor(dtype, {rows, shape.num_heads, shape.value_dim}),
                    .dlse = {}};
  in.q.fill_normal(4 * seed);
  in.k.fill_normal(4 * seed + 1);
  in.v.fill_normal(4 * seed + 2);
  in.dout.fill_normal(4 * seed + 3);
  return in;
}

}  // namespace cpattn::testing
