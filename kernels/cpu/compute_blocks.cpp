#include "kernels/cpu/compute_blocks.h"

#include "kernels/cpu/packed_kv.h"

namespace cpattn::cpu {
namespace {

/// Floats of k and of v of all heads in compute form, f32 engine.
std::int64_t widened_k(const AttentionShape& shape, std::int64_t num_keys) {
  return shape.num_kv_heads * panels(num_keys) * kPanel * shape.head_dim;
}
std::int64_t widened_v(const AttentionShape& shape, std::int64_t num_keys) {
  return shape.num_kv_heads * panels(shape.value_dim) * kPanel * num_keys;
}

}  // namespace

std::int64_t widened_floats(const KernelProblem& problem, Engine engine, std::int64_t keys,
                            std::int64_t blocks) {
  if (!must_widen(problem.dtype, engine)) return 0;
  // Every block fills up to a whole panel of keys.
  return widened_k(problem.shape, keys + blocks * (kPanel - 1)) + widened_v(problem.shape, keys);
}

void place_blocks(const KernelProblem& problem, Engine engine, std::span<const KvBlock> from,
                  ComputeBlock* blocks, float* area) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::int64_t num_keys = from[i].num_keys;
    blocks[i].num_keys = num_keys;
    if (must_widen(problem.dtype, engine)) {
      blocks[i].k = area;
      blocks[i].v = area + widened_k(problem.shape, num_keys);
      area += widened_k(problem.shape, num_keys) + widened_v(problem.shape, num_keys);
    } else {
      const PackedSizes sizes = packed_sizes(problem, engine, num_keys);
      blocks[i].k = reinterpret_cast<const float*>(from[i].packed);
      blocks[i].v = reinterpret_cast<const float*>(from[i].packed + sizes.k);
    }
  }
}

void widen_block(const KernelProblem& problem, const TileKernels& kernels, const KvBlock& from,
                 const ComputeBlock& to) {
  const PackedSizes sizes = packed_sizes(problem, Engine::f32, from.num_keys);
  kernels.widen(from.packed, problem.dtype, widened_k(problem.shape, from.num_keys),
                const_cast<float*>(to.k));
  kernels.widen(from.packed + sizes.k, problem.dtype, widened_v(problem.shape, from.num_keys),
                const_cast<float*>(to.v));
}

}  // namespace cpattn::cpu
