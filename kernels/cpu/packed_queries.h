// The form in which q and dout are computed on by the backward, with lse and delta: one packed tile
// (gradient_kernels.h, QueryTileLayout) per head and 48 rows, heads outermost.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_gradient.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

std::size_t packed_query_bytes(const KernelProblem& problem, Engine engine, std::int64_t num_rows);
void pack_queries(const PackQueriesArgs& args, const TileKernels& kernels, Engine engine);

}  // namespace cpattn::cpu
