#include "kernels/cuda/sum_dkv.h"

#include <algorithm>

#include "kernels/cuda/check_gradient.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sum_dkv.cuh"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

GradientTensor gradient_tensor(const AnyTensor& tensor) {
  return {tensor.data, tensor.dtype, tensor.strides[0], tensor.strides[1]};
}

OpOnSlots op_on_slots(const DkvOp& op) {
  return {op.kind, reinterpret_cast<float*>(op.dst), reinterpret_cast<const float*>(op.left),
          reinterpret_cast<const float*>(op.right)};
}

/// Collects ops, all of one chunk behind each other, and launches when no more fit.
class Batches {
 public:
  explicit Batches(const SumDkvArgs& args)
      : args_(args),
        params_{.form = gradient_slot_form(args.problem.shape),
                .dk = gradient_tensor(args.dk),
                .dv = gradient_tensor(args.dv),
                .scale = static_cast<float>(args.problem.shape.softmax_scale),
                .num_kv_heads = narrow<int>(args.problem.shape.num_kv_heads),
                .chunks = {},
                .ops = {}} {}

  void begin_chunk(const PackChunk& chunk) {
    if (num_chunks_ == kSumChunks || num_ops_ == kSumOps) flush();
    params_.chunks[num_chunks_++] = {chunk.row_begin, chunk.num_keys, num_ops_, num_ops_};
    longest_ = std::max(longest_, chunk.num_keys);
  }

  /// Of the chunk that was begun last.
  void add(const DkvOp& op) {
    if (num_ops_ == kSumOps) {
      const ChunkToSum chunk = params_.chunks[num_chunks_ - 1];
      flush();
      begin_chunk({chunk.row_begin, chunk.num_keys, 0});
    }
    params_.ops[num_ops_++] = op_on_slots(op);
    params_.chunks[num_chunks_ - 1].op_end = num_ops_;
  }

  void flush() {
    const std::int64_t quads = params_.num_kv_heads * params_.form.head_floats(longest_) / 4;
    if (quads > 0 && num_ops_ > 0) {
      const std::int64_t blocks = ceil_div(quads, std::int64_t{kSumThreads});
      launch(sum_dkv_kernel, dim3(narrow<unsigned>(blocks), static_cast<unsigned>(num_chunks_)),
             dim3(kSumThreads), 0, static_cast<cudaStream_t>(args_.stream.handle), params_);
    }
    num_chunks_ = num_ops_ = 0;
    longest_ = 0;
  }

 private:
  const SumDkvArgs& args_;
  SumParams params_;
  int num_chunks_ = 0, num_ops_ = 0;
  std::int64_t longest_ = 0;
};

}  // namespace

GradientSlotForm gradient_slot_form(const AttentionShape& shape) {
  return {narrow<int>(shape.head_dim), narrow<int>(shape.value_dim)};
}

std::size_t dq_slot_bytes(const KernelProblem& problem) {
  const int row_floats = gradient_slot_form(problem.shape).dk_floats();
  const std::int64_t floats = problem.shape.num_heads * problem.max_chunk_rows * row_floats;
  return round_up(static_cast<std::size_t>(floats) * sizeof(float), kSlotAlignment);
}

std::size_t dkv_slot_bytes(const KernelProblem& problem, std::int64_t num_keys) {
  const std::int64_t floats =
      problem.shape.num_kv_heads * gradient_slot_form(problem.shape).head_floats(num_keys);
  return round_up(static_cast<std::size_t>(floats) * sizeof(float), kSlotAlignment);
}

void sum_dkv(const SumDkvArgs& args) {
  check_sum_dkv(args);
  Batches batches(args);
  for (std::size_t chunk = 0; chunk < args.chunks.size(); ++chunk) {
    bool is_begun = false;
    for (const DkvOp& op : args.ops) {
      if (static_cast<std::size_t>(op.kv_chunk) != chunk) continue;
      if (!is_begun) batches.begin_chunk(args.chunks[chunk]);
      is_begun = true;
      batches.add(op);
    }
  }
  batches.flush();
}

void zero_rows(const ZeroRowsArgs& args) {
  const AnyTensor& tensor = args.tensor;
  const std::int64_t elements = args.num_rows * tensor.shape[1] * tensor.shape[2];
  if (elements == 0) return;
  launch(zero_rows_kernel, dim3(narrow<unsigned>(ceil_div(elements, std::int64_t{kSumThreads}))),
         dim3(kSumThreads), 0, static_cast<cudaStream_t>(args.stream.handle),
         ZeroParams{tensor.row(args.row_begin, 0), static_cast<std::int64_t>(size_of(tensor.dtype)),
                    tensor.strides[0], tensor.strides[1], args.num_rows, tensor.shape[1],
                    tensor.shape[2]});
}

}  // namespace cpattn::cuda
