// Runs one document on one KernelTable without any rank: the kernels' contract, nothing of cp/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/device/memory.h"
#include "tests/support/attention_case.h"
#include "tests/support/tested_tables.h"

namespace cpattn::testing {

/// A step's image where the kernels read it; nothing for kernels that have none.
template <class Args>
Buffer image_of(std::vector<std::byte> (*step_image)(const Args& args), const Args& args) {
  if (step_image == nullptr) return {};
  const std::vector<std::byte> bytes = step_image(args);
  Buffer image(bytes.size());
  std::copy(bytes.begin(), bytes.end(), image.data());
  return image;
}

/// Memory for the calls of one problem on one table.
class KernelRunner {
 public:
  /// `key_chunks`: lengths of the kv blocks, in order; their sum is the number of keys.
  KernelRunner(const KernelTable& table, const KernelProblem& problem, const AnyConstTensor& k,
               const AnyConstTensor& v, std::span<const std::int64_t> key_chunks)
      : table_(table), problem_(problem) {
    std::vector<PackChunk> chunks;
    std::size_t bytes = 0;
    for (const std::int64_t keys : key_chunks) {
      chunks.push_back({num_keys_, keys, bytes});
      bytes += table.packed_kv_bytes(problem, keys);
      num_keys_ += keys;
    }
    packed_ = Buffer(bytes);
    table.pack_kv({.problem = problem,
                   .k = k,
                   .v = v,
                   .chunks = chunks,
                   .packed = packed_.data(),
                   .stream = tested().stream});
    for (const PackChunk& chunk : chunks)
      blocks_.push_back({packed_.data() + chunk.offset, chunk.num_keys});
  }

  struct Call {
    AnyConstTensor q;
    AnyTensor out;
    TensorView<float, 2> lse;
    std::span<const QueryProgram> programs;
    int num_scratch_slots = 1;
    int num_carried_slots = 0;
    ProgressHook progress = {};
    float* head_maxima = nullptr;
  };

  void forward(const Call& call) {
    const StepLimits limits{.keys = num_keys_,
                            .blocks = static_cast<std::int64_t>(blocks_.size()),
                            .scratch_slots = call.num_scratch_slots};
    Buffer workspace(table_.workspace_bytes(problem_, limits));
    const auto carried_slots = static_cast<std::size_t>(call.num_carried_slots);
    if (carried_.size_bytes() == 0)
      carried_ = Buffer(carried_slots * table_.carried_slot_bytes(problem_));
    ForwardArgs args{.problem = problem_,
                     .q = call.q,
                     .out = call.out,
                     .lse = call.lse,
                     .kv_blocks = blocks_,
                     .programs = call.programs,
                     .carried = carried_.data(),
                     .workspace = workspace.data(),
                     .limits = limits,
                     .progress = call.progress,
                     .stream = tested().stream,
                     .head_maxima = call.head_maxima};
    const Buffer image = image_of(table_.step_image, args);
    args.image = image.data();
    table_.forward(args);
  }

  /// The carried slots of the calls so far.
  std::byte* carried() const { return carried_.data(); }

 private:
  const KernelTable& table_;
  KernelProblem problem_;
  Buffer packed_;
  std::vector<KvBlock> blocks_;
  std::int64_t num_keys_ = 0;
  Buffer carried_;
};

/// Block masks of a document: what query `first_row` of the program sees of the keys from
/// `first_key` on.
inline BlockMask block_mask(const AttentionCase& problem, std::int64_t first_row,
                            std::int64_t first_key) {
  const Document& document = problem.batch.documents.front();
  return {problem.config.mask, first_row + 1 + document.kv_tokens - document.q_tokens - first_key};
}

struct KernelRun {
  int num_threads = 1;
  std::int64_t rows_per_program = 0;  ///< q chunk length; 0: all rows in one program
};

/// The inputs and outputs of a call, under any strides.
struct BlockTensors {
  AnyConstTensor q, k, v;
  AnyTensor out;
  TensorView<float, 2> lse;
};

/// The only document of `problem` with all its keys in one block: block, finalize. The tensors
/// inside `problem` are not used.
inline void run_one_block(const KernelTable& table, const AttentionCase& problem,
                          const BlockTensors& tensors, const KernelRun& run = {}) {
  const std::int64_t q_rows = problem.batch.q_rows, kv_rows = problem.batch.kv_rows;
  const std::int64_t rows = run.rows_per_program == 0 ? q_rows : run.rows_per_program;
  const KernelProblem kernel_problem{.shape = problem.shape,
                                     .dtype = problem.dtype,
                                     .max_chunk_rows = rows,
                                     .num_threads = run.num_threads};
  KernelRunner runner(table, kernel_problem, tensors.k, tensors.v, std::span(&kv_rows, 1));

  const SlotIndex slot = scratch_slot(0);
  std::vector<StateOp> ops;
  for (std::int64_t first = 0; first < q_rows; first += rows) {
    ops.push_back({.kind = StateOpKind::block,
                   .dst = slot,
                   .kv_block = 0,
                   .mask = block_mask(problem, first, 0)});
    ops.push_back({.kind = StateOpKind::finalize, .left = slot, .mask = {}});
  }
  std::vector<QueryProgram> programs;
  for (std::int64_t first = 0, op = 0; first < q_rows; first += rows, op += 2)
    programs.push_back({first, std::min(rows, q_rows - first),
                        std::span<const StateOp>(ops).subspan(static_cast<std::size_t>(op), 2)});
  runner.forward({.q = tensors.q, .out = tensors.out, .lse = tensors.lse, .programs = programs});
}

/// A result for `problem`, every number still NaN.
inline Attended unset_result(const AttentionCase& problem) {
  const std::int64_t q_rows = problem.batch.q_rows, heads = problem.shape.num_heads;
  return {HostTensor(problem.out_dtype, {q_rows, heads, problem.shape.value_dim}),
          std::vector<float>(static_cast<std::size_t>(q_rows * heads), kNan)};
}

inline TensorView<float, 2> lse_view(Attended& result) {
  return contiguous_view(result.lse.data(),
                         std::array{result.out.shape()[0], result.out.shape()[1]});
}

inline Attended run_one_block(const KernelTable& table, const AttentionCase& problem,
                              const KernelRun& run = {}) {
  Attended result = unset_result(problem);
  run_one_block(
      table, problem,
      {problem.q.view(), problem.k.view(), problem.v.view(), result.out.view(), lse_view(result)},
      run);
  return result;
}

}  // namespace cpattn::testing
