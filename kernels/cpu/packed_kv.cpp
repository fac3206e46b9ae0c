#include "kernels/cpu/packed_kv.h"

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

HeadSizes head_sizes(const KernelProblem& problem, Engine engine, std::int64_t num_keys) {
  const std::size_t element = engine == Engine::bf16_pair ? 4 : size_of(problem.dtype);
  const std::int64_t k = panels(num_keys) * steps_of(engine, problem.shape.head_dim) * kPanel;
  const std::int64_t v = panels(problem.shape.value_dim) * value_rows(engine, num_keys) * kPanel;
  return {static_cast<std::size_t>(k) * element, static_cast<std::size_t>(v) * element};
}

void check(const AnyConstTensor& tensor, const char* name, const KernelProblem& problem,
           std::int64_t rows, std::int64_t dim) {
  require(tensor.dtype == problem.dtype && tensor.shape[0] == rows &&
              tensor.shape[1] == problem.shape.num_kv_heads && tensor.shape[2] == dim &&
              (tensor.strides[2] == 1 || dim == 1),
          name, ": ", name_of(tensor.dtype), " [", tensor.shape[0], ", ", tensor.shape[1], ", ",
          tensor.shape[2], "], last stride ", tensor.strides[2], ", expected ",
          name_of(problem.dtype), " [", rows, ", ", problem.shape.num_kv_heads, ", ", dim,
          "] with a contiguous last dimension");
}

}  // namespace

PackedSizes packed_sizes(const KernelProblem& problem, Engine engine, std::int64_t num_keys) {
  const HeadSizes head = head_sizes(problem, engine, num_keys);
  const auto heads = static_cast<std::size_t>(problem.shape.num_kv_heads);
  return {round_up(heads * head.k, kAlignment), round_up(heads * head.v, kAlignment)};
}

void pack_kv(const PackKvArgs& args, const TileKernels& kernels) {
  const AttentionShape& shape = args.problem.shape;
  const Engine engine = engine_of(args.problem.dtype, kernels.has_bf16_dot);
  check(args.k, "k", args.problem, args.k.shape[0], shape.head_dim);
  check(args.v, "v", args.problem, args.k.shape[0], shape.value_dim);
  const auto element = static_cast<std::int64_t>(size_of(args.problem.dtype));
  const auto num_chunks = static_cast<std::int64_t>(args.chunks.size());
#pragma omp parallel for num_threads(args.problem.num_threads) if (args.problem.num_threads > 1) \
    schedule(dynamic, 1)
  for (std::int64_t i = 0; i < num_chunks * shape.num_kv_heads; ++i) {
    const PackChunk& chunk = args.chunks[static_cast<std::size_t>(i / shape.num_kv_heads)];
    const std::int64_t head = i % shape.num_kv_heads;
    const HeadSizes sizes = head_sizes(args.problem, engine, chunk.num_keys);
    const std::size_t v_part = packed_sizes(args.problem, engine, chunk.num_keys).k;
    std::byte* packed = args.packed + chunk.offset;
    kernels.pack({.engine = engine,
                  .dtype = args.problem.dtype,
                  .num_keys = chunk.num_keys,
                  .head_dim = shape.head_dim,
                  .value_dim = shape.value_dim,
                  .k = args.k.row(chunk.row_begin, head),
                  .k_row_bytes = args.k.strides[0] * element,
                  .v = args.v.row(chunk.row_begin, head),
                  .v_row_bytes = args.v.strides[0] * element,
                  .packed_k = packed + static_cast<std::size_t>(head) * sizes.k,
                  .packed_v = packed + v_part + static_cast<std::size_t>(head) * sizes.v});
  }
}

}  // namespace cpattn::cpu
