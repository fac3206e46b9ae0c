#include "kernels/cuda/pack_queries.h"

#include <algorithm>

#include "kernels/cuda/check_gradient.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack_queries.cuh"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

QueryForm form_of(const AttentionShape& shape) {
  return {num_panels(shape.head_dim), num_panels(shape.value_dim)};
}

TensorRows tensor_rows(const AnyConstTensor& tensor) {
  return {tensor.data, tensor.dtype, tensor.strides[0], tensor.strides[1]};
}

ScalarRows scalar_rows(const TensorView<const float, 2>& view) {
  return {view.data, view.strides[0], view.strides[1]};
}

void start(const PackQueriesArgs& args, const PackQueriesParams& params, std::int64_t num_tiles) {
  const auto kernel =
      args.problem.dtype == DType::bf16 ? pack_queries_kernel<bf16> : pack_queries_kernel<f16>;
  launch(kernel, dim3(narrow<unsigned>(num_tiles)), dim3(kPackQueryThreads), kPackQuerySharedBytes,
         static_cast<cudaStream_t>(args.stream.handle), params);
}

}  // namespace

std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows) {
  return static_cast<std::size_t>(problem.shape.num_heads *
                                  form_of(problem.shape).head_bytes(num_rows));
}

void pack_queries(const PackQueriesArgs& args) {
  check_pack_queries(args);
  const AttentionShape& shape = args.problem.shape;
  PackQueriesParams params{.q = piece_rows(args.q),
                           .out = tensor_rows(args.out),
                           .dout = tensor_rows(args.dout),
                           .lse = scalar_rows(args.lse),
                           .dlse = scalar_rows(args.dlse),
                           .form = form_of(shape),
                           .value_dim = static_cast<int>(shape.value_dim),
                           .chunks = {}};
  for (std::size_t first = 0; first < args.chunks.size(); first += kPackQueryChunks) {
    const std::size_t end = std::min(first + kPackQueryChunks, args.chunks.size());
    std::int64_t tiles = 0;
    params.num_chunks = 0;
    for (std::size_t i = first; i < end; ++i) {
      const PackChunk& chunk = args.chunks[i];
      params.chunks[params.num_chunks++] = {chunk.row_begin, chunk.num_keys, tiles,
                                            args.packed + chunk.offset};
      tiles += shape.num_heads * num_tiles(chunk.num_keys);
    }
    if (tiles > 0) start(args, params, tiles);
  }
}

}  // namespace cpattn::cuda
