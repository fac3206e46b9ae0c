// The form in which k and v travel and are computed on: contiguous per head, one chunk after the
// other.
//
// A packed chunk is [K of every kv head][V of every kv head] in panels (tile_kernels.h,
// ComputeBlock), each part rounded up to 64 bytes. Elements keep the input's type; without the bf16
// dot instruction, 16-bit elements are widened to f32 when a step begins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

constexpr Engine engine_of(DType dtype, bool has_bf16_dot) {
  return dtype == DType::bf16 && has_bf16_dot ? Engine::bf16_pair : Engine::f32;
}

/// With pairs, all products of the backward run on them, and dout.v contracts channels as q.k does.
constexpr KvForm gradient_form_of(DType dtype, bool has_bf16_dot) {
  const Engine engine = engine_of(dtype, has_bf16_dot);
  return {engine, engine == Engine::f32 ? ValueForm::channels : ValueForm::keys};
}

/// Bytes of the two parts of a packed chunk.
struct PackedSizes {
  std::size_t k;
  std::size_t v;
};
PackedSizes packed_sizes(const KernelProblem& problem, const KvForm& form, std::int64_t num_keys);

void pack_kv(const PackKvArgs& args, const TileKernels& kernels, const KvForm& form);

}  // namespace cpattn::cpu
