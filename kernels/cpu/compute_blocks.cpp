#include "kernels/cpu/compute_blocks.h"

#include "kernels/cpu/packed_kv.h"

namespace cpattn::cpu {
namespace {

/// Floats of all heads in compute form, f32 engine.
std::int64_t widened_k(const AttentionShape& shape, std::int64_t num_keys) {
  return shape.num_kv_heads * panels(num_keys) * kPanel * shape.head_dim;
}
std::int64_t widened_v(const AttentionShape& shape, std::int64_t num_keys) {
  return shape.num_kv_heads * panels(shape.value_dim) * kPanel * num_keys;
}

/// Floats of one head's k by channels, in pairs.
std::int64_t head_by_channels(const AttentionShape& shape, std::int64_t num_keys) {
  return panels(shape.head_dim) * kPanel * value_rows(Engine::bf16_pair, num_keys);
}

}  // namespace

std::int64_t prepared_floats(const KernelProblem& problem, const KvForm& form, std::int64_t keys,
                             std::int64_t blocks) {
  const AttentionShape& shape = problem.shape;
  if (must_widen(problem.dtype, form.engine)) {
    // Every block fills up to a whole panel of keys.
    return widened_k(shape, keys + blocks * (kPanel - 1)) + widened_v(shape, keys);
  }
  if (form.values == ValueForm::channels) return 0;
  // Every block fills up to a whole pair of keys.
  return shape.num_kv_heads * head_by_channels(shape, keys + blocks);
}

void place_blocks(const KernelProblem& problem, const KvForm& form, std::span<const KvBlock> from,
                  ComputeBlock* blocks, float* area) {
  const AttentionShape& shape = problem.shape;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::int64_t num_keys = from[i].num_keys;
    blocks[i] = {.num_keys = num_keys};
    if (must_widen(problem.dtype, form.engine)) {
      blocks[i].k = area;
      blocks[i].v = area + widened_k(shape, num_keys);
      area += widened_k(shape, num_keys) + widened_v(shape, num_keys);
      continue;
    }
    blocks[i].k = reinterpret_cast<const float*>(from[i].packed);
    blocks[i].v =
        reinterpret_cast<const float*>(from[i].packed + packed_sizes(problem, form, num_keys).k);
    if (form.values == ValueForm::channels) continue;
    blocks[i].k_by_channels = area;
    area += shape.num_kv_heads * head_by_channels(shape, num_keys);
  }
}

void prepare_block(const KernelProblem& problem, const KvForm& form, const TileKernels& kernels,
                   const KvBlock& from, const ComputeBlock& to) {
  const AttentionShape& shape = problem.shape;
  if (must_widen(problem.dtype, form.engine)) {
    kernels.widen(from.packed, problem.dtype, widened_k(shape, from.num_keys),
                  const_cast<float*>(to.k));
    kernels.widen(from.packed + packed_sizes(problem, form, from.num_keys).k, problem.dtype,
                  widened_v(shape, from.num_keys), const_cast<float*>(to.v));
  }
  if (form.values == ValueForm::channels) return;
  const std::int64_t head_floats =
      panels(from.num_keys) * kPanel * steps_of(form.engine, shape.head_dim);
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head) {
    kernels.pair_keys(
        to.k + head * head_floats, from.num_keys, shape.head_dim,
        const_cast<float*>(to.k_by_channels) + head * head_by_channels(shape, from.num_keys));
  }
}

}  // namespace cpattn::cpu
