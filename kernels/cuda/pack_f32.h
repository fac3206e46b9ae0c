// Shards to packed chunks of f32 rows (f32_form.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"

namespace cpattn::cuda::f32 {

/// Bytes of a packed chunk of `num_keys` keys.
std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys);

/// KernelTable::pack_kv. Chunks are parameters of launches, many to each: nothing is read by the
/// device but k and v, so it can be captured.
void pack_kv(const PackKvArgs& args);

}  // namespace cpattn::cuda::f32
