// What the owner of kv chunks does with partial sums of dk, dv: f32, [kv head][key][dk, padded D]
// [dv, padded Dv].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_gradient.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

std::size_t dkv_slot_bytes(const KernelProblem& problem, std::int64_t num_keys);
void sum_dkv(const SumDkvArgs& args, const TileKernels& kernels);
void zero_rows(const ZeroRowsArgs& args);

}  // namespace cpattn::cpu
