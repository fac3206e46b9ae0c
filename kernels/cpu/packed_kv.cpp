#include "kernels/cpu/packed_kv.h"

#include <cstring>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

/// Rows [key][dim] of one head, `padded` elements of `size` bytes apart, padding zeroed.
void pack_rows(const AnyConstTensor& from, std::int64_t head, std::int64_t padded, std::byte* to) {
  const auto size = static_cast<std::int64_t>(size_of(from.dtype));
  const auto row_bytes = static_cast<std::size_t>(from.shape[2] * size);
  const auto padded_bytes = static_cast<std::size_t>(padded * size);
  for (std::int64_t key = 0; key < from.shape[0]; ++key) {
    std::memcpy(to, from.row(key, head), row_bytes);
    std::memset(to + row_bytes, 0, padded_bytes - row_bytes);
    to += padded_bytes;
  }
}

/// 16-bit rows 2j and 2j+1 of one head, element by element side by side; a missing last row is 0.
void pack_row_pairs(const AnyConstTensor& from, std::int64_t head, std::byte* to) {
  const std::int64_t dim = from.shape[2];
  auto* pairs = reinterpret_cast<std::uint16_t*>(to);
  for (std::int64_t key = 0; key < from.shape[0]; key += 2) {
    const auto* even = reinterpret_cast<const std::uint16_t*>(from.row(key, head));
    if (key + 1 < from.shape[0]) {
      const auto* odd = reinterpret_cast<const std::uint16_t*>(from.row(key + 1, head));
      for (std::int64_t d = 0; d < dim; ++d) {
        pairs[2 * d] = even[d];
        pairs[2 * d + 1] = odd[d];
      }
    } else {
      for (std::int64_t d = 0; d < dim; ++d) {
        pairs[2 * d] = even[d];
        pairs[2 * d + 1] = 0;
      }
    }
    pairs += 2 * dim;
  }
}

}  // namespace

PackedSizes packed_sizes(const KernelProblem& problem, Engine engine, std::int64_t num_keys) {
  const AttentionShape& shape = problem.shape;
  const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t k_dim =
      engine == Engine::f32 ? shape.head_dim : 2 * ceil_div<std::int64_t>(shape.head_dim, 2);
  const std::int64_t v_keys =
      engine == Engine::f32 ? num_keys : 2 * ceil_div<std::int64_t>(num_keys, 2);
  const std::int64_t k_bytes = shape.num_kv_heads * num_keys * k_dim * element;
  const std::int64_t v_bytes = shape.num_kv_heads * v_keys * shape.value_dim * element;
  return {round_up(static_cast<std::size_t>(k_bytes), kAlignment),
          round_up(static_cast<std::size_t>(v_bytes), kAlignment)};
}

void pack_kv(const PackKvArgs& args, Engine engine) {
  const AttentionShape& shape = args.problem.shape;
  const std::int64_t num_keys = args.k.shape[0];
  require(args.k.dtype == args.problem.dtype && args.v.dtype == args.problem.dtype,
          "k and v must be ", name_of(args.problem.dtype), ", got ", name_of(args.k.dtype), " and ",
          name_of(args.v.dtype));
  require(args.v.shape[0] == num_keys && args.k.shape[1] == shape.num_kv_heads &&
              args.v.shape[1] == shape.num_kv_heads && args.k.shape[2] == shape.head_dim &&
              args.v.shape[2] == shape.value_dim,
          "k [", num_keys, ", ", args.k.shape[1], ", ", args.k.shape[2], "] and v [",
          args.v.shape[0], ", ", args.v.shape[1], ", ", args.v.shape[2],
          "] do not fit num_kv_heads ", shape.num_kv_heads, ", head_dim ", shape.head_dim,
          ", value_dim ", shape.value_dim);
  const PackedSizes sizes = packed_sizes(args.problem, engine, num_keys);
  const auto heads = static_cast<std::size_t>(shape.num_kv_heads);
  const auto element = size_of(args.problem.dtype);
  const std::int64_t k_dim =
      engine == Engine::f32 ? shape.head_dim : round_up<std::int64_t>(shape.head_dim, 2);
  const std::int64_t v_keys =
      engine == Engine::f32 ? num_keys : round_up<std::int64_t>(num_keys, 2);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto h = static_cast<std::int64_t>(head);
    std::byte* k = args.packed + head * static_cast<std::size_t>(num_keys * k_dim) * element;
    std::byte* v =
        args.packed + sizes.k + head * static_cast<std::size_t>(v_keys * shape.value_dim) * element;
    pack_rows(args.k, h, k_dim, k);
    if (engine == Engine::f32) {
      pack_rows(args.v, h, shape.value_dim, v);
    } else {
      pack_row_pairs(args.v, h, v);
    }
  }
}

}  // namespace cpattn::cpu
