// The kv blocks of a step in the form that is computed on: in place where the packed form is that
// form, otherwise made once per step, in the workspace: 16-bit elements widened to f32, and k by
// channels where the backward needs it.
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

/// Whether prepare_block has anything to do: to widen, or to lay out k by channels.
constexpr bool must_prepare(DType dtype, const KvForm& form) {
  return must_widen(dtype, form.engine) || form.values == ValueForm::keys;
}

/// Floats that hold what is made of `keys` keys in `blocks` blocks; 0 when nothing is.
std::int64_t prepared_floats(const KernelProblem& problem, const KvForm& form, std::int64_t keys,
                             std::int64_t blocks);

/// Where each block lies in compute form; what is made for a step lies in `area`, block after
/// block, still to be filled by prepare_block.
void place_blocks(const KernelProblem& problem, const KvForm& form, std::span<const KvBlock> from,
                  ComputeBlock* blocks, float* area);

void prepare_block(const KernelProblem& problem, const KvForm& form, const TileKernels& kernels,
                   const KvBlock& from, const ComputeBlock& to);

}  // namespace cpattn::cpu
