// The seam between the instruction-set sources and the rest of the CPU backend: plain structs and
// function pointers, so that nothing compiled with wider instructions can leak into other sources.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/block_attention.h"
#include "kernels/f32_engine.h"

namespace cpattn::cpu {

struct GradientTileKernels;  // gradient_kernels.h

using cpattn::kKeyTile;
/// 3 vectors of 16 lanes. Equal for every instruction set: one state layout.
using cpattn::kQueryTile;

/// Query tiles of a chunk.
constexpr std::int64_t tiles_of(std::int64_t num_rows) {
  return (num_rows + kQueryTile - 1) / kQueryTile;
}

/// Parts of a thread's memory whose sizes are multiples of 4 KiB would start at equal page offsets,
/// and a load from one would wait for a store to another with the same low 12 bits. Some lines in
/// between avoid that (measured: 5 points of the FMA peak).
inline constexpr std::int64_t kStagger = 33 * 16;

/// How q, k, v are held while computing. An element is 4 bytes either way.
enum class Engine {
  f32,        ///< element = one float
  bf16_pair,  ///< element = two neighbouring bf16, multiplied by the bf16 dot instruction
};

/// How v lies beside k: by channels, as P.V reads it, or like k, as dout.v with pairs reads it.
enum class ValueForm { channels, keys };

/// What a packed chunk is made for.
struct KvForm {
  Engine engine = Engine::f32;
  ValueForm values = ValueForm::channels;
};

/// Width of the panels in which k and v lie: 8 keys of k, 8 channels of v.
inline constexpr std::int64_t kPanel = 8;

/// One kv block in compute form, elements of 4 bytes, every head padded with zeros to whole panels.
/// Key j, step s of kv head h: k[((h * panels(num_keys) + j / 8) * steps + s) * 8 + j % 8].
/// Channel d of key j: v[((h * panels(Dv) + d / 8) * rows + row) * 8 + d % 8], where f32 has a row
/// for every key, and bf16_pair one for every two: keys 2 row (low half) and 2 row + 1 (a missing
/// last one is 0). So both inner loops read one stream of neighbouring numbers, whatever the head
/// size. ValueForm::keys: v lies as k does, with the steps of Dv.
struct ComputeBlock {
  const float* k = nullptr;
  const float* v = nullptr;
  const float* k_by_channels = nullptr;  ///< k as v lies above: the backward of pairs only
  std::int64_t num_keys = 0;
};

constexpr std::int64_t panels(std::int64_t count) { return (count + kPanel - 1) / kPanel; }

/// Rows of v for num_keys keys.
constexpr std::int64_t value_rows(Engine engine, std::int64_t num_keys) {
  return engine == Engine::f32 ? num_keys : (num_keys + 1) / 2;
}

/// Elements of the contracted dimension of q.k.
constexpr std::int64_t steps_of(Engine engine, std::int64_t head_dim) {
  return engine == Engine::f32 ? head_dim : (head_dim + 1) / 2;
}

/// State of one tile of one head: m[48], l[48], o[Dv rounded up to whole panels][48].
constexpr std::int64_t state_floats(std::int64_t value_dim) {
  return (panels(value_dim) * kPanel + 2) * kQueryTile;
}

/// Memory of one thread, every part 64-byte aligned.
struct TileScratch {
  float* q = nullptr;       ///< [steps][48]
  float* scores = nullptr;  ///< [kKeyTile][48]
  float* states = nullptr;  ///< scratch slots, state_floats each
};

/// One program on one tile of one query head.
struct TileJob {
  const AttentionShape* shape = nullptr;
  Engine engine = Engine::f32;
  const StateOp* ops = nullptr;
  std::int64_t num_ops = 0;
  std::int64_t first_row = 0;  ///< of the tile within its q chunk
  std::int64_t num_rows = 0;   ///< 1 .. 48
  std::int64_t kv_head = 0;

  const std::byte* q = nullptr;  ///< row 0 of the tile, this head
  std::int64_t q_row_bytes = 0;
  DType dtype = DType::f32;

  const ComputeBlock* blocks = nullptr;
  float* carried = nullptr;       ///< slot 0 of this tile and head
  std::int64_t carried_slot = 0;  ///< floats from one carried slot to the next

  std::byte* out = nullptr;  ///< row 0 of the tile, this head
  std::int64_t out_row_bytes = 0;
  DType out_dtype = DType::f32;
  float* lse = nullptr;
  std::int64_t lse_row_stride = 0;
  float* largest_m = nullptr;  ///< or null: raised to the largest m of finished rows
  ProgressHook progress;
};

/// Keys [first_key, end_key) of one kv chunk, all heads, as the caller has them. first_key is a
/// multiple of 8, and so is end_key unless it is num_keys.
struct PackJob {
  KvForm form;
  DType dtype = DType::f32;
  std::int64_t num_keys = 0;  ///< of the chunk
  std::int64_t first_key = 0;
  std::int64_t end_key = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  const std::byte* k = nullptr;  ///< key 0 of the chunk, head 0
  std::int64_t k_row_bytes = 0;
  std::int64_t k_head_bytes = 0;
  const std::byte* v = nullptr;
  std::int64_t v_row_bytes = 0;
  std::int64_t v_head_bytes = 0;
  std::byte* packed_k = nullptr;  ///< elements of the input's size (pairs: 4 bytes)
  std::byte* packed_v = nullptr;
};

struct TileKernels {
  void (*pack)(const PackJob& job) = nullptr;
  /// One head's k in pairs of channels, panels of keys, to pairs of keys, panels of channels.
  void (*pair_keys)(const float* k, std::int64_t num_keys, std::int64_t head_dim,
                    float* k_by_channels) = nullptr;
  void (*run_tile)(const TileJob& job, const TileScratch& scratch) = nullptr;
  /// `count` elements of f16 or bf16 to f32.
  void (*widen)(const std::byte* from, DType dtype, std::int64_t count, float* to) = nullptr;
  /// Register-only multiply-accumulates for measuring the peak rate: flops done in `rounds` rounds.
  double (*burn)(Engine engine, std::int64_t rounds) = nullptr;
  bool has_bf16_dot = false;
  const GradientTileKernels* gradient = nullptr;
};

const TileKernels& generic_tile_kernels();
#if defined(__x86_64__)
const TileKernels& avx2_tile_kernels();
const TileKernels& avx512_tile_kernels();
const TileKernels& avx512_bf16_tile_kernels();
#endif

}  // namespace cpattn::cpu
