#include "kernels/cuda/pack_queries_f32.h"

#include <algorithm>

#include "kernels/cuda/check_gradient.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack_queries_f32.cuh"
#include "src/base/integers.h"

namespace cpattn::cuda::f32 {
namespace {

TensorRows tensor_rows(const AnyConstTensor& tensor) {
  return {tensor.data, tensor.dtype, tensor.strides[0], tensor.strides[1]};
}

ScalarRows scalar_rows(const TensorView<const float, 2>& view) {
  return {view.data, view.strides[0], view.strides[1]};
}

void start(const PackQueriesArgs& args, const PackQueriesParams& params) {
  if (params.num_tiles == 0) return;
  launch(pack_queries_kernel,
         dim3(narrow<unsigned>(ceil_div<std::int64_t>(params.num_tiles, kDeltaWarps))),
         dim3(32 * kDeltaWarps), kDeltaSharedBytes, static_cast<cudaStream_t>(args.stream.handle),
         params);
}

}  // namespace

std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows) {
  const std::int64_t floats =
      query_parts(form_of(problem.shape), problem.shape.num_heads, num_rows).total;
  return round_up(static_cast<std::size_t>(floats) * sizeof(float), kPackedAlignment);
}

void pack_queries(const PackQueriesArgs& args) {
  check_pack_queries(args);
  const AttentionShape& shape = args.problem.shape;
  PackQueriesParams params{.q = tensor_rows(args.q),
                           .delta = {.num_rows = args.q.shape[0],
                                     .num_heads = shape.num_heads,
                                     .value_dim = shape.value_dim,
                                     .out = tensor_rows(args.out),
                                     .dout = tensor_rows(args.dout),
                                     .lse = scalar_rows(args.lse),
                                     .dlse = scalar_rows(args.dlse)},
                           .form = form_of(shape),
                           .num_heads = shape.num_heads,
                           .chunks = {}};
  for (std::size_t first = 0; first < args.chunks.size(); first += kPackQueryChunks) {
    const std::size_t end = std::min(first + kPackQueryChunks, args.chunks.size());
    params.num_tiles = 0;
    params.num_chunks = 0;
    for (std::size_t i = first; i < end; ++i) {
      const PackChunk& chunk = args.chunks[i];
      params.chunks[params.num_chunks++] = {chunk.row_begin, chunk.num_keys, params.num_tiles,
                                            args.packed + chunk.offset};
      params.num_tiles += shape.num_heads * query_tiles(chunk.num_keys);
    }
    start(args, params);
  }
}

}  // namespace cpattn::cuda::f32
