#include "kernels/cpu/packed_queries.h"

#include <algorithm>

#include "kernels/check_gradient.h"
#include "kernels/cpu/gradient_kernels.h"

namespace cpattn::cpu {
namespace {

StridedRows rows_of(const AnyConstTensor& tensor, std::int64_t row, std::int64_t head) {
  return {tensor.row(row, head),
          tensor.strides[0] * static_cast<std::int64_t>(size_of(tensor.dtype)), tensor.dtype};
}

void pack_tile(const PackQueriesArgs& args, const TileKernels& kernels, Engine engine,
               const PackChunk& chunk, std::int64_t head, std::int64_t tile) {
  const std::int64_t first_row = tile * kQueryTile, row = chunk.row_begin + first_row;
  const bool has_dlse = args.dlse.data != nullptr;
  const std::int64_t index = head * tiles_of(chunk.num_keys) + tile;
  kernels.gradient->pack_query_tile(
      {.shape = &args.problem.shape,
       .engine = engine,
       .num_rows = std::min(chunk.num_keys - first_row, kQueryTile),
       .q = rows_of(args.q, row, head),
       .out = rows_of(args.out, row, head),
       .dout = rows_of(args.dout, row, head),
       .lse = &args.lse(row, head),
       .lse_stride = args.lse.strides[0],
       .dlse = has_dlse ? &args.dlse(row, head) : nullptr,
       .dlse_stride = args.dlse.strides[0],
       .packed = reinterpret_cast<float*>(args.packed + chunk.offset) +
                 index * query_tile_layout(engine, args.problem.shape).total});
}

}  // namespace

std::size_t packed_query_bytes(const KernelProblem& problem, Engine engine, std::int64_t num_rows) {
  return static_cast<std::size_t>(problem.shape.num_heads * tiles_of(num_rows) *
                                  query_tile_layout(engine, problem.shape).total) *
         sizeof(float);
}

void pack_queries(const PackQueriesArgs& args, const TileKernels& kernels, Engine engine) {
  check_pack_queries(args);
  std::int64_t tiles = 0;
  for (const PackChunk& chunk : args.chunks) tiles = std::max(tiles, tiles_of(chunk.num_keys));
  const std::int64_t heads = args.problem.shape.num_heads;
  const std::int64_t num_jobs = static_cast<std::int64_t>(args.chunks.size()) * tiles * heads;
  // Heads inside: the caller's rows hold all heads side by side.
#pragma omp parallel for num_threads(args.problem.num_threads) if (args.problem.num_threads > 1) \
    schedule(dynamic, 1)
  for (std::int64_t i = 0; i < num_jobs; ++i) {
    const PackChunk& chunk = args.chunks[static_cast<std::size_t>(i / heads / tiles)];
    const std::int64_t tile = i / heads % tiles;
    if (tile < tiles_of(chunk.num_keys)) pack_tile(args, kernels, engine, chunk, i % heads, tile);
  }
}

}  // namespace cpattn::cpu
