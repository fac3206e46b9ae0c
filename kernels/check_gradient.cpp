#include "kernels/check_gradient.h"

#include <algorithm>

#include "src/base/error.h"

namespace cpattn {
namespace {

void check_tensor(const AnyConstTensor& tensor, const char* name, std::int64_t rows,
                  std::int64_t heads, std::int64_t dim) {
  require(tensor.shape[0] == rows && tensor.shape[1] == heads && tensor.shape[2] == dim &&
              tensor.has_contiguous_rows(),
          name, " [", tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2],
          "], last stride ", tensor.strides[2], ": expected [", rows, ", ", heads, ", ", dim,
          "] with a contiguous last dimension");
}

void check_rows(const TensorView<const float, 2>& view, const char* name, std::int64_t rows,
                std::int64_t heads) {
  require(view.shape[0] == rows && view.shape[1] == heads, name, " [", view.shape[0], ", ",
          view.shape[1], "]: expected [", rows, ", ", heads, "]");
}

void check_chunks(std::span<const PackChunk> chunks, const char* name, std::int64_t rows) {
  for (const PackChunk& chunk : chunks) {
    require(chunk.row_begin >= 0 && chunk.num_keys >= 0 && chunk.row_begin + chunk.num_keys <= rows,
            name, " of rows [", chunk.row_begin, ", ", chunk.row_begin + chunk.num_keys, ") of ",
            rows);
  }
}

void check_blocks(const BackwardArgs& args) {
  const GradientLimits& limits = args.limits;
  std::int64_t keys = 0, longest = 0;
  for (const KvBlock& block : args.kv_blocks) {
    keys += block.num_keys;
    longest = std::max(longest, block.num_keys);
  }
  const auto kv_blocks = static_cast<std::int64_t>(args.kv_blocks.size());
  const auto q_blocks = static_cast<std::int64_t>(args.q_blocks.size());
  require(keys <= limits.keys && kv_blocks <= limits.kv_blocks && longest <= limits.block_keys,
          kv_blocks, " kv blocks of ", keys, " keys, the longest of ", longest, ": planned for ",
          limits.kv_blocks, " of ", limits.keys, ", the longest of ", limits.block_keys);
  require(q_blocks <= limits.q_blocks, q_blocks, " q chunks, planned for ", limits.q_blocks);
  for (const QueryBlock& block : args.q_blocks) {
    require(block.num_rows >= 0 && block.num_rows <= args.problem.max_chunk_rows &&
                block.row_begin >= 0 && block.row_begin + block.num_rows <= args.dq.shape[0],
            "q chunk of rows [", block.row_begin, ", ", block.row_begin + block.num_rows,
            "): expected at most ", args.problem.max_chunk_rows, " rows within ", args.dq.shape[0]);
  }
}

void check_task(const BackwardArgs& args, const GradientTask& task) {
  require(task.q_chunk >= 0 && task.q_chunk < static_cast<std::int64_t>(args.q_blocks.size()),
          "task on q chunk ", task.q_chunk, " of ", args.q_blocks.size());
  require(task.kv_block >= 0 && task.kv_block < static_cast<std::int64_t>(args.kv_blocks.size()),
          "task on kv block ", task.kv_block, " of ", args.kv_blocks.size());
  const auto check_scratch = [](SlotIndex slot, bool continues) {
    require(!is_scratch(slot) || (slot == scratch_slot(0) && !continues), "scratch slot ",
            scratch_number(slot), continues ? " continued" : "",
            ": expected 0, and a fresh start for it");
  };
  const auto check_dkv = [&](SlotIndex slot) {
    check_scratch(slot, false);
    require(is_scratch(slot) || slot < static_cast<std::int64_t>(args.dkv_slots.size()),
            "dkv slot ", slot, " of ", args.dkv_slots.size());
  };
  check_scratch(task.dq, task.continues_dq);
  check_scratch(task.dkv, task.continues_dkv);
  check_dkv(task.dkv);
  for (const SumOp& op : task.dq_sums)
    for (const SlotIndex slot : {op.dst, op.left, op.right}) check_scratch(slot, false);
  for (const SumOp& op : task.dkv_sums)
    for (const SlotIndex slot : {op.dst, op.left, op.right}) check_dkv(slot);
  if (task.dq_result != kNoSlot) check_scratch(task.dq_result, false);
}

}  // namespace

void check_pack_queries(const PackQueriesArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  const std::int64_t rows = args.q.shape[0];
  check_tensor(args.q, "q", rows, shape.num_heads, shape.head_dim);
  check_tensor(args.out, "out", rows, shape.num_heads, shape.value_dim);
  check_tensor(args.dout, "dout", rows, shape.num_heads, shape.value_dim);
  require(args.q.dtype == args.problem.dtype, "q is ", name_of(args.q.dtype), ", expected ",
          name_of(args.problem.dtype));
  check_rows(args.lse, "lse", rows, shape.num_heads);
  if (args.dlse.data != nullptr) check_rows(args.dlse, "dlse", rows, shape.num_heads);
  check_chunks(args.chunks, "q chunk", rows);
}

void check_backward(const BackwardArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  check_tensor(args.dq, "dq", args.dq.shape[0], shape.num_heads, shape.head_dim);
  check_blocks(args);
  for (const GradientTask& task : args.tasks) check_task(args, task);
}

void check_sum_dkv(const SumDkvArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  const std::int64_t rows = args.dk.shape[0];
  check_tensor(args.dk, "dk", rows, shape.num_kv_heads, shape.head_dim);
  check_tensor(args.dv, "dv", rows, shape.num_kv_heads, shape.value_dim);
  check_chunks(args.chunks, "kv chunk", rows);
  for (const DkvOp& op : args.ops) {
    require(op.kv_chunk >= 0 && op.kv_chunk < static_cast<std::int64_t>(args.chunks.size()),
            "sum on kv chunk ", op.kv_chunk, " of ", args.chunks.size());
    const bool writes = op.kind == DkvOpKind::sum || op.kind == DkvOpKind::copy;
    const bool reads = op.kind != DkvOpKind::finish_empty;
    require((!writes || op.dst != nullptr) && (!reads || op.left != nullptr) &&
                (op.kind != DkvOpKind::sum || op.right != nullptr),
            "sum on kv chunk ", op.kv_chunk, " lacks a place");
  }
}

}  // namespace cpattn
