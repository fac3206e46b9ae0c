#include "kernels/cuda/pack_kv.h"

#include <algorithm>

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack_kv.cuh"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

KvForm form_of(const AttentionShape& shape) {
  return {num_panels(shape.head_dim), num_panels(shape.value_dim)};
}

}  // namespace

std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
  return static_cast<std::size_t>(problem.shape.num_kv_heads *
                                  form_of(problem.shape).head_bytes(num_keys));
}

void pack_kv(const PackKvArgs& args) {
  check_pack_kv(args);
  PackParams params{.k = piece_rows(args.k),
                    .v = piece_rows(args.v),
                    .form = form_of(args.problem.shape),
                    .chunks = {}};
  for (std::size_t first = 0; first < args.chunks.size(); first += kPackChunks) {
    const std::size_t end = std::min(first + kPackChunks, args.chunks.size());
    std::int64_t panels = 0;
    params.num_chunks = 0;
    for (std::size_t i = first; i < end; ++i) {
      const PackChunk& chunk = args.chunks[i];
      params.chunks[params.num_chunks++] = {chunk.row_begin, chunk.num_keys, panels,
                                            args.packed + chunk.offset};
      panels +=
          static_cast<std::int64_t>(packed_kv_bytes(args.problem, chunk.num_keys)) / kPanelBytes;
    }
    if (panels == 0) continue;
    launch(pack_kv_kernel, dim3(narrow<unsigned>(panels)), dim3(kPackThreads), 0,
           static_cast<cudaStream_t>(args.stream.handle), params);
  }
}

}  // namespace cpattn::cuda
