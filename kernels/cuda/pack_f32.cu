#include "kernels/cuda/pack_f32.h"

#include <algorithm>

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack_f32.cuh"
#include "src/base/integers.h"

namespace cpattn::cuda::f32 {

std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
  const std::int64_t floats =
      problem.shape.num_kv_heads * form_of(problem.shape).kv_floats(num_keys);
  return round_up(static_cast<std::size_t>(floats) * sizeof(float), kPackedAlignment);
}

void pack_kv(const PackKvArgs& args) {
  check_pack_kv(args);
  PackParams params{.k = piece_rows(args.k),
                    .v = piece_rows(args.v),
                    .form = form_of(args.problem.shape),
                    .chunks = {}};
  for (std::size_t first = 0; first < args.chunks.size(); first += kPackChunks) {
    const std::size_t end = std::min(first + kPackChunks, args.chunks.size());
    params.num_rows = 0;
    params.num_chunks = 0;
    for (std::size_t i = first; i < end; ++i) {
      const PackChunk& chunk = args.chunks[i];
      params.chunks[params.num_chunks++] = {chunk.row_begin, chunk.num_keys, params.num_rows,
                                            args.packed + chunk.offset};
      params.num_rows += args.problem.shape.num_kv_heads * chunk.num_keys;
    }
    if (params.num_rows == 0) continue;
    launch(pack_kv_kernel,
           dim3(narrow<unsigned>(ceil_div<std::int64_t>(params.num_rows, kPackWarps))),
           dim3(kPackThreads), 0, static_cast<cudaStream_t>(args.stream.handle), params);
  }
}

}  // namespace cpattn::cuda::f32
