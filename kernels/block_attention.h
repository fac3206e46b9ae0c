// The contract of the forward kernels: a *program* of blocks, merges and finalizes for runs of
// query rows.
//
// Nouns. A *chunk* is a fixed-size run of one document (the unit of ownership and of merge order).
// A *kv block* is one packed kv chunk that is present in this step. A *program* belongs to one q
// chunk: a list of StateOps over *slots*, each slot one (m, l, o) state (lse.h) for every row and
// head of the q chunk. Slots < 0 are scratch (they live while the program runs), slots >= 0 are
// carried from step to step in the caller's `carried` memory. Programs are data made by
// cp/schedule; a kernel executes them and knows nothing of why they are as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/mask.h"
#include "kernels/shape.h"
#include "src/base/tensor_view.h"
#include "src/device/device.h"

namespace cpattn {

/// Index of a state: >= 0 carried across steps, < 0 scratch number (-1 - slot) of this program.
using SlotIndex = std::int32_t;
constexpr SlotIndex scratch_slot(int number) { return -1 - number; }
constexpr bool is_scratch(SlotIndex slot) { return slot < 0; }
constexpr int scratch_number(SlotIndex slot) { return -1 - slot; }

enum class StateOpKind {
  block,       ///< dst = the state of `kv_block` under `mask`, from a fresh start
  accumulate,  ///< dst = dst continued over `kv_block` under `mask` (order-free lane: the `arrival`
               ///< schedule)
  merge,       ///< dst = merge(left, right); dst may be left or right
  finalize,    ///< out, lse of the rows = result of `left`
  finalize_empty,  ///< out = 0, lse = -inf: the rows see no key at all
};

struct StateOp {
  StateOpKind kind = StateOpKind::block;
  SlotIndex dst = 0;
  SlotIndex left = 0;
  SlotIndex right = 0;
  std::int32_t kv_block = -1;
  BlockMask mask = {};
};

/// What one step does for one q chunk: rows [row_begin, row_begin + num_rows) of the local q.
struct QueryProgram {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::span<const StateOp> ops;
};

/// A kv chunk in packed form (pack_kv), as it travels: all kv heads of num_keys keys, `bytes` long.
struct KvBlock {
  const std::byte* packed = nullptr;
  std::int64_t num_keys = 0;
};

/// Called by the thread that called forward(), between tiles (every 50 to 200 us): the caller's
/// chance to move bytes.
struct ProgressHook {
  void (*call)(void* context) noexcept = nullptr;
  void* context = nullptr;
  void operator()() const {
    if (call != nullptr) call(context);
  }
};

/// Fixed facts of a problem that sizes and layouts depend on. `dtype` is that of q, k and v.
struct KernelProblem {
  AttentionShape shape;
  DType dtype = DType::f32;
  std::int64_t max_chunk_rows = 0;  ///< the longest q chunk (chunk_tokens)
  int num_threads = 1;  ///< that work at a time: threads of a CPU, thread blocks of a GPU
};

/// A chunk within a shard: rows [row_begin, row_begin + num_keys), packed at `offset`.
struct PackChunk {
  std::int64_t row_begin = 0;
  std::int64_t num_keys = 0;
  std::size_t offset = 0;  ///< a multiple of 64
};

struct PackKvArgs {
  KernelProblem problem;
  AnyConstTensor k;  ///< [Tk, Hkv, D], the local shard
  AnyConstTensor v;  ///< [Tk, Hkv, Dv]
  std::span<const PackChunk> chunks;
  std::byte* packed = nullptr;  ///< 64-byte aligned; packed_kv_bytes(num_keys) bytes at each offset
  Stream stream = {};
};

/// The most any step of a plan holds; sizes the workspace.
struct StepLimits {
  std::int64_t keys = 0;
  std::int64_t blocks = 0;
  int scratch_slots = 0;  ///< of any one program
};

struct ForwardArgs {
  KernelProblem problem;
  AnyConstTensor q;                        ///< [Tq, Hq, D], the local shard
  AnyTensor out;                           ///< [Tq, Hq, Dv], f32, f16 or bf16
  TensorView<float, 2> lse;                ///< [Tq, Hq]
  std::span<const KvBlock> kv_blocks;      ///< present in this step
  std::span<const QueryProgram> programs;  ///< one or none for each q chunk
  std::byte* carried = nullptr;            ///< num_carried_slots * carried_slot_bytes(problem)
  std::byte* workspace = nullptr;          ///< workspace_bytes(problem, limits)
  StepLimits limits;                       ///< as the workspace was sized
  ProgressHook progress;
  Stream stream = {};
  /// KernelTable::step_image of the same blocks and programs, in device memory; null for kernels
  /// that have none.
  const std::byte* image = nullptr;
  /// [Hq] or null: head_maxima[h] = max(head_maxima[h], largest visible logit of the rows that are
  /// finished), a logit being softmax_scale * q.k as m of its state says: m ln 2, rounded once
  /// more. A maximum has no rounding of its own, so it is in no particular order. A row
  /// whose l is NaN makes it NaN (m passes a NaN by), which stays; rows that see no key contribute
  /// nothing.
  float* head_maxima = nullptr;
};

}  // namespace cpattn
