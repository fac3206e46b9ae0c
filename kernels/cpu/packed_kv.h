// The form in which k and v travel and are computed on: contiguous per head, one chunk after the
// other.
//
// A packed chunk is [K of every kv head][V of every kv head], each part rounded up to 64 bytes. f32
// and f16 (and bf16 without the dot instruction) keep rows [key][dim] in the input's type; the pair
// engine pads head_dim to even and interleaves V by key pairs (tile_kernels.h, ComputeBlock).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"
#include "kernels/cpu/tile_kernels.h"

namespace cpattn::cpu {

constexpr Engine engine_of(DType dtype, bool has_bf16_dot) {
  return dtype == DType::bf16 && has_bf16_dot ? Engine::bf16_pair : Engine::f32;
}

/// Bytes of the two parts of a packed chunk.
struct PackedSizes {
  std::size_t k;
  std::size_t v;
};
PackedSizes packed_sizes(const KernelProblem& problem, Engine engine, std::int64_t num_keys);

void pack_kv(const PackKvArgs& args, Engine engine);

}  // namespace cpattn::cpu
