#include "kernels/cuda/check_args.h"

#include <cstdint>

#include "src/base/error.h"

namespace cpattn::cuda {
namespace {

/// What cp.async and the swizzle ask of packed forms, and float4 of states.
constexpr std::size_t kPackedAlignment = 64, kStateAlignment = 16;

void check_problem(const KernelProblem& problem) {
  const AttentionShape& shape = problem.shape;
  require(shape.head_dim >= 1 && shape.head_dim <= kMaxHeadDim && shape.value_dim >= 1 &&
              shape.value_dim <= kMaxHeadDim,
          "head_dim ", shape.head_dim, ", value_dim ", shape.value_dim, ": kernels/cuda has 1 to ",
          kMaxHeadDim);
}

void check_dtype(const AnyConstTensor& tensor, const char* name, DType dtype) {
  require(tensor.dtype == dtype, name, " is ", name_of(tensor.dtype), ", expected ",
          name_of(dtype));
}

}  // namespace

void check_tensor(const AnyConstTensor& tensor, const char* name, std::int64_t rows,
                  std::int64_t heads, std::int64_t dim) {
  require(tensor.shape[0] == rows && tensor.shape[1] == heads && tensor.shape[2] == dim &&
              tensor.has_contiguous_rows(),
          name, " [", tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2],
          "], last stride ", tensor.strides[2], ": expected [", rows, ", ", heads, ", ", dim,
          "] with a contiguous last dimension");
}

void check_alignment(const void* memory, const char* name, std::size_t alignment) {
  require(reinterpret_cast<std::uintptr_t>(memory) % alignment == 0, name, " at ", memory,
          ": expected a multiple of ", alignment, " bytes");
}

void check_pack_kv(const PackKvArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  check_problem(args.problem);
  check_dtype(args.k, "k", args.problem.dtype);
  check_dtype(args.v, "v", args.problem.dtype);
  check_tensor(args.k, "k", args.k.shape[0], shape.num_kv_heads, shape.head_dim);
  check_tensor(args.v, "v", args.k.shape[0], shape.num_kv_heads, shape.value_dim);
  for (const PackChunk& chunk : args.chunks)
    check_alignment(args.packed + chunk.offset, "packed", kPackedAlignment);
}

void check_forward(const ForwardArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  const std::int64_t rows = args.q.shape[0];
  check_problem(args.problem);
  check_dtype(args.q, "q", args.problem.dtype);
  check_tensor(args.q, "q", rows, shape.num_heads, shape.head_dim);
  check_tensor(args.out, "out", rows, shape.num_heads, shape.value_dim);
  require(args.lse.shape[0] == rows && args.lse.shape[1] == shape.num_heads, "lse [",
          args.lse.shape[0], ", ", args.lse.shape[1], "]: expected [", rows, ", ", shape.num_heads,
          "]");
  check_alignment(args.carried, "carried", kStateAlignment);
  check_alignment(args.workspace, "workspace", kStateAlignment);
  std::int64_t keys = 0;
  for (const KvBlock& block : args.kv_blocks) {
    check_alignment(block.packed, "packed", kPackedAlignment);
    keys += block.num_keys;
  }
  require(keys <= args.limits.keys &&
              static_cast<std::int64_t>(args.kv_blocks.size()) <= args.limits.blocks,
          args.kv_blocks.size(), " kv blocks of ", keys, " keys, planned for ", args.limits.blocks,
          " of ", args.limits.keys);
  for (const QueryProgram& program : args.programs)
    require(program.num_rows <= args.problem.max_chunk_rows, "a program of ", program.num_rows,
            " rows: planned for ", args.problem.max_chunk_rows);
  require(args.programs.empty() || args.image != nullptr,
          "no image of the step: expected step_image() in device memory");
}

}  // namespace cpattn::cuda
