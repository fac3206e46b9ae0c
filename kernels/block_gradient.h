// The contract of the backward kernels: tasks of one q chunk x one kv block, and the sums that
// follow them.
//
// Nouns as in block_attention.h. A *task* makes two leaves: the contribution of one kv chunk to dq
// of one q chunk, and that of one q chunk (all its query heads) to dk, dv of one kv chunk. A leaf
// is computed from a fresh start; the sums after it fold it into the canonical trees of that q
// chunk (over kv chunks) and of that kv chunk (over q chunks). Leaves, partial sums and what
// travels between ranks are f32 and unscaled: softmax_scale is applied once to dq and dk, with the
// one rounding to the caller's type, when they are finished. Which slot holds what is data made by
// cp; a kernel executes it and knows nothing of why it is so.
//
// Mathematics, for row i and key j that it sees (Dao 2022, section 3.1, with dlse):
//   p_ij = exp(softmax_scale q_i.k_j - lse_i)       delta_i = dout_i.out_i - dlse_i
//   ds_ij = p_ij (dout_i.v_j - delta_i)
//   dv_j = sum_i p_ij dout_i     dq_i = softmax_scale sum_j ds_ij k_j
//   dk_j = softmax_scale sum_i ds_ij q_i            (sums over the query heads of a group too)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/block_attention.h"
#include "kernels/launch_tiles.h"
#include "kernels/mask.h"
#include "kernels/shape.h"
#include "src/base/tensor_view.h"

namespace cpattn {

/// dst = left + right, element by element; dst may be left or right.
struct SumOp {
  SlotIndex dst = 0;
  SlotIndex left = 0;
  SlotIndex right = 0;
};

inline constexpr SlotIndex kNoSlot = INT32_MIN;

/// One q chunk x one kv block, all heads.
///
/// dq slots: >= 0 are carried from step to step (dq_slot_bytes each, any q chunk fits);
/// scratch_slot(0) is the task's own. dkv slots: >= 0 are places in BackwardArgs::dkv_slots;
/// scratch_slot(0) is the task's own. A leaf that is added to nothing yet goes to its slot >= 0 at
/// once; otherwise it goes to scratch and is the right or left side of the first sum.
struct GradientTask {
  std::int32_t q_chunk = 0;   ///< index into BackwardArgs::q_blocks
  std::int32_t kv_block = 0;  ///< index into BackwardArgs::kv_blocks
  BlockMask mask = {};
  SlotIndex dq = 0;            ///< where the dq leaf goes
  SlotIndex dkv = 0;           ///< where the dk, dv leaf goes
  bool continues_dq = false;   ///< order-free lane: add to what the slot holds, no fresh start
  bool continues_dkv = false;  ///< likewise
  std::span<const SumOp> dq_sums = {};   ///< after the leaf, in order
  std::span<const SumOp> dkv_sums = {};  ///< after the leaf, in order
  SlotIndex dq_result = kNoSlot;  ///< != kNoSlot: this slot, times the scale, is the q chunk's dq
};

/// A q chunk in packed form (pack_queries): q, dout, lse, delta of all query heads.
struct QueryBlock {
  const std::byte* packed = nullptr;
  std::int64_t row_begin = 0;  ///< local row of its first query
  std::int64_t num_rows = 0;
};

struct PackQueriesArgs {
  KernelProblem problem;
  AnyConstTensor q;                   ///< [Tq, Hq, D], the local shard, problem.dtype
  AnyConstTensor out;                 ///< [Tq, Hq, Dv], as forward left it
  AnyConstTensor dout;                ///< [Tq, Hq, Dv], any dtype
  TensorView<const float, 2> lse;     ///< [Tq, Hq], as forward left it
  TensorView<const float, 2> dlse;    ///< [Tq, Hq], or no data: zeros
  std::span<const PackChunk> chunks;  ///< row_begin, number of rows (num_keys), offset
  std::byte* packed = nullptr;        ///< 64-byte aligned
  Stream stream = {};
};

/// The most any step of a backward holds; sizes the workspace.
struct GradientLimits {
  std::int64_t keys = 0;        ///< of all kv blocks of a step together
  std::int64_t kv_blocks = 0;   ///< of a step
  std::int64_t block_keys = 0;  ///< of the longest kv block
  std::int64_t q_blocks = 0;    ///< q chunks of the shard
};

struct BackwardArgs {
  KernelProblem problem;
  std::span<const QueryBlock> q_blocks;  ///< all q chunks of the shard
  std::span<const KvBlock> kv_blocks;    ///< present in this step, packed by GradientKernels
  /// Executed as if one after the other. A kernel may overlap tasks, but those of one q chunk, and
  /// those of one kv block, keep their order.
  std::span<const GradientTask> tasks;
  std::byte* dq_slots = nullptr;          ///< carried dq slots, dq_slot_bytes each
  std::span<std::byte* const> dkv_slots;  ///< dkv_slot_bytes(num_keys of its kv chunk) each
  AnyTensor dq;                           ///< [Tq, Hq, D], any dtype: results
  std::byte* workspace = nullptr;         ///< GradientKernels::workspace_bytes
  GradientLimits limits;                  ///< as the workspace was sized
  ProgressHook progress;
  Stream stream = {};
  /// GradientKernels::step_image of the same blocks and tasks, in device memory; null for kernels
  /// that have none.
  const std::byte* image = nullptr;
};

enum class DkvOpKind {
  sum,     ///< dst = left + right (dst may be either)
  copy,    ///< dst = left
  finish,  ///< dk = softmax_scale * dk part of left, dv = its dv part, rounded to the caller's type
  finish_empty,  ///< no query sees the chunk: dk = dv = 0
};

/// What the owner of kv chunks does with partial sums that are whole chunks.
struct DkvOp {
  DkvOpKind kind = DkvOpKind::sum;
  std::int32_t kv_chunk = 0;  ///< index into SumDkvArgs::chunks
  std::byte* dst = nullptr;
  const std::byte* left = nullptr;
  const std::byte* right = nullptr;
};

struct SumDkvArgs {
  KernelProblem problem;
  std::span<const PackChunk> chunks;  ///< own kv chunks: row_begin, num_keys (offset unused)
  std::span<const DkvOp> ops;         ///< those of one chunk are executed in order
  AnyTensor dk;                       ///< [Tk, Hkv, D], any dtype
  AnyTensor dv;                       ///< [Tk, Hkv, Dv], any dtype
  ProgressHook progress;
  Stream stream = {};
};

struct ZeroRowsArgs {
  AnyTensor tensor;
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  Stream stream = {};
};

/// The backward half of a KernelTable.
struct GradientKernels {
  /// Bytes of a kv chunk in the form the backward computes on; may differ from forward's.
  std::size_t (*packed_kv_bytes)(const KernelProblem& problem, std::int64_t num_keys) = nullptr;
  void (*pack_kv)(const PackKvArgs& args) = nullptr;

  /// Bytes of a packed q chunk, a multiple of 64.
  std::size_t (*packed_query_bytes)(const KernelProblem& problem, std::int64_t num_rows) = nullptr;
  /// Copies q and dout into the form that is computed on (with the bf16 dot instruction dout is
  /// rounded to bf16), and computes delta from it: f32, d ascending, one fma per element. Once per
  /// backward, at the owner. A row with lse = -inf saw no key.
  void (*pack_queries)(const PackQueriesArgs& args) = nullptr;

  std::size_t (*dq_slot_bytes)(const KernelProblem& problem) = nullptr;
  /// f32 dk and dv of a kv chunk, all kv heads; a multiple of 64; no pointers inside: it travels.
  std::size_t (*dkv_slot_bytes)(const KernelProblem& problem, std::int64_t num_keys) = nullptr;
  std::size_t (*workspace_bytes)(const KernelProblem& problem,
                                 const GradientLimits& limits) = nullptr;

  /// Executes the tasks of one step.
  ///
  /// Order   dq leaf: keys ascending in tiles, one accumulator per element and tile, tiles added up
  ///         in ascending order. dk, dv leaf: query heads of the group ascending; per head, query
  ///         tiles ascending; per tile rows ascending from 0, tiles added up. A tile pair that sees
  ///         nothing is left out. Bits depend on the chunks, the mask and the sums only: not on
  ///         threads, packing, strides or what else is in the step.
  /// Masked  a (row, key) pair that is not visible contributes nothing, whatever the numbers are.
  /// Errors  InvalidArgument before any work. Never communicates, allocates nothing.
  /// Cost    2 * pairs * Hq * (3 D + 2 Dv) flop.
  /// Source  FlashAttention-2 (Dao 2023), algorithm 2.
  void (*backward)(const BackwardArgs& args) = nullptr;

  void (*sum_dkv)(const SumDkvArgs& args) = nullptr;

  /// Zeros, which are the same bits in every type: gradients of rows that see no key.
  void (*zero_rows)(const ZeroRowsArgs& args) = nullptr;

  /// As KernelTable::step_image: reads all of BackwardArgs that says what is done where, and no
  /// number of any tensor.
  std::vector<std::byte> (*step_image)(const BackwardArgs& args) = nullptr;

  /// As KernelTable::launch_tiles: the launches of a backward(), in their order; null on a CPU.
  std::vector<LaunchTiles> (*launch_tiles)(const KernelProblem& problem) = nullptr;
};

}  // namespace cpattn
