// The kv blocks of a step in the form that is computed on: in place where the packed form is that
// form, otherwise widened to f32 once per step, into the workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/block_attention.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

constexpr bool must_widen(DType dtype, Engine engine) {
  return dtype != DType::f32 && engine == Engine::f32;
}

/// Floats that hold `keys` keys in `blocks` blocks widened; 0 when nothing is.
std::int64_t widened_floats(const KernelProblem& problem, Engine engine, std::int64_t keys,
                            std::int64_t blocks);

/// Where each block lies in compute form; widened ones follow each other in `area`, still to be
/// filled by widen_block.
void place_blocks(const KernelProblem& problem, Engine engine, std::span<const KvBlock> from,
                  ComputeBlock* blocks, float* area);

void widen_block(const KernelProblem& problem, const TileKernels& kernels, const KvBlock& from,
                 const ComputeBlock& to);

}  // namespace cpattn::cpu
