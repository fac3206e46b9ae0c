#include "kernels/cpu/packed_kv.h"

#include <algorithm>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

/// Bytes of one head's part of a packed chunk.
struct HeadSizes {
  std::size_t k;
  std::size_t v;
};

HeadSizes head_sizes(const KernelProblem& problem, const KvForm& form, std::int64_t num_keys) {
  const std::size_t element = form.engine == Engine::bf16_pair ? 4 : size_of(problem.dtype);
  const auto like_k = [&](std::int64_t dim) {
    return panels(num_keys) * steps_of(form.engine, dim) * kPanel;
  };
  const std::int64_t value_dim = problem.shape.value_dim;
  const std::int64_t k = like_k(problem.shape.head_dim);
  const std::int64_t v = form.values == ValueForm::keys
                             ? like_k(value_dim)
                             : panels(value_dim) * value_rows(form.engine, num_keys) * kPanel;
  return {static_cast<std::size_t>(k) * element, static_cast<std::size_t>(v) * element};
}

void check(const AnyConstTensor& tensor, const char* name, const KernelProblem& problem,
           std::int64_t rows, std::int64_t dim) {
  require(tensor.dtype == problem.dtype && tensor.shape[0] == rows &&
              tensor.shape[1] == problem.shape.num_kv_heads && tensor.shape[2] == dim &&
              tensor.has_contiguous_rows(),
          name, ": ", name_of(tensor.dtype), " [", tensor.shape[0], ", ", tensor.shape[1], ", ",
          tensor.shape[2], "], last stride ", tensor.strides[2], ", expected ",
          name_of(problem.dtype), " [", rows, ", ", problem.shape.num_kv_heads, ", ", dim,
          "] with a contiguous last dimension");
}

std::int64_t longest_chunk(std::span<const PackChunk> chunks) {
  std::int64_t longest = 0;
  for (const PackChunk& chunk : chunks) longest = std::max(longest, chunk.num_keys);
  return longest;
}

}  // namespace

PackedSizes packed_sizes(const KernelProblem& problem, const KvForm& form, std::int64_t num_keys) {
  const HeadSizes head = head_sizes(problem, form, num_keys);
  const auto heads = static_cast<std::size_t>(problem.shape.num_kv_heads);
  return {round_up(heads * head.k, kAlignment), round_up(heads * head.v, kAlignment)};
}

void pack_kv(const PackKvArgs& args, const TileKernels& kernels, const KvForm& form) {
  const AttentionShape& shape = args.problem.shape;
  check(args.k, "k", args.problem, args.k.shape[0], shape.head_dim);
  check(args.v, "v", args.problem, args.k.shape[0], shape.value_dim);
  const auto element = static_cast<std::int64_t>(size_of(args.problem.dtype));
  // Pieces of a chunk rather than whole chunks, so that a shard of one chunk keeps all threads
  // busy.
  constexpr std::int64_t kPieceKeys = 64;
  const std::int64_t pieces = ceil_div(longest_chunk(args.chunks), kPieceKeys);
  const std::int64_t num_jobs = static_cast<std::int64_t>(args.chunks.size()) * pieces;
#pragma omp parallel for num_threads(args.problem.num_threads) if (args.problem.num_threads > 1) \
    schedule(dynamic, 1)
  for (std::int64_t i = 0; i < num_jobs; ++i) {
    const PackChunk& chunk = args.chunks[static_cast<std::size_t>(i / pieces)];
    const std::int64_t first_key = i % pieces * kPieceKeys;
    if (first_key >= chunk.num_keys) continue;
    std::byte* packed = args.packed + chunk.offset;
    kernels.pack({.form = form,
                  .dtype = args.problem.dtype,
                  .num_keys = chunk.num_keys,
                  .first_key = first_key,
                  .end_key = std::min(first_key + kPieceKeys, chunk.num_keys),
                  .num_heads = shape.num_kv_heads,
                  .head_dim = shape.head_dim,
                  .value_dim = shape.value_dim,
                  .k = args.k.row(chunk.row_begin, 0),
                  .k_row_bytes = args.k.strides[0] * element,
                  .k_head_bytes = args.k.strides[1] * element,
                  .v = args.v.row(chunk.row_begin, 0),
                  .v_row_bytes = args.v.strides[0] * element,
                  .v_head_bytes = args.v.strides[1] * element,
                  .packed_k = packed,
                  .packed_v = packed + packed_sizes(args.problem, form, chunk.num_keys).k});
  }
}

}  // namespace cpattn::cpu
