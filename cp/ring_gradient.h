// The distributed backward: kv shards travel as in forward, and sums of dk, dv go straight home.
//
// In each step a rank works on one arrived kv shard and folds, for every kv chunk of it, the leaves
// of its own q chunks as far as the canonical tree over q chunks allows (gradient_schedule.h). What
// is left, the *pieces*, are whole tree nodes; they leave for the owner of the shard while the next
// step is computed, and the owner folds what arrives along the same tree. dq never travels. So five
// products per pair, f32 on the wire, memory linear in the shard, and every sum is the same for
// every split.
#pragma once

#include <cstddef>
#include <vector>

#include "cp/gradient_binding.h"
#include "cp/gradient_plan.h"
#include "cp/plan.h"
#include "cp/step_images.h"
#include "src/comm/direct_exchange.h"
#include "src/comm/ring_exchange.h"
#include "src/comm/shard_transport.h"
#include "src/device/memory.h"

namespace cpattn {

/// Local shard of everything the backward reads and writes, rows as Plan::shard() orders them, in
/// memory of the transport's device.
struct BackwardTensors {
  AnyConstTensor q;                 ///< [q_rows, Hq, D], as given to forward
  AnyConstTensor k;                 ///< [kv_rows, Hkv, D]
  AnyConstTensor v;                 ///< [kv_rows, Hkv, Dv]
  AnyConstTensor out;               ///< [q_rows, Hq, Dv], as forward left it
  TensorView<const float, 2> lse;   ///< [q_rows, Hq], as forward left it
  AnyConstTensor dout;              ///< [q_rows, Hq, Dv], out's dtype or f32
  TensorView<const float, 2> dlse;  ///< [q_rows, Hq]; no data: zeros
  AnyTensor dq;                     ///< [q_rows, Hq, D], f32 | f16 | bf16
  AnyTensor dk;                     ///< [kv_rows, Hkv, D]
  AnyTensor dv;                     ///< [kv_rows, Hkv, Dv]
};

/// Owns the memory of one plan's backward on one communicator; backward() may be called any number
/// of times.
///
/// Thread-safety  as RingAttention.
class RingGradient {
 public:
  /// Collective, as RingAttention's. `plan`, `gradient` and `transport` must outlive this; the
  /// plans are read at every backward().
  RingGradient(const Plan& plan, const GradientPlan& gradient, ShardTransport& transport);

  /// Collective. Gradients of this rank's q, k and v rows.
  ///
  /// Shapes   see BackwardTensors; gradients may have another dtype than their tensor. Strides any;
  ///          last dimension contiguous; outputs share no element with inputs or each other
  ///          (interleaved views of one buffer do not).
  /// Stream   as forward().
  /// Errors   InvalidArgument on every rank, before any tensor moves; CommError as forward().
  /// Cost     2 * Shard::visible_pairs * Hq * (3 D + 2 Dv) flop; GradientPlan::bytes_on_wire().
  void backward(const BackwardTensors& tensors, Stream stream = {});

  const RingStats& ring_stats() const { return ring_.stats(); }
  const TransferStats& piece_stats() const { return pieces_.stats(); }

 private:
  void pack_own(const BackwardTensors& tensors, Stream stream);
  void run_tasks(std::size_t step, const BackwardTensors& tensors, Stream stream);
  void send_pieces(std::size_t step, Stream stream);
  void fold_pieces(std::size_t step, const BackwardTensors& tensors, Stream stream);
  std::byte* fold_place(const FoldOp& op, SlotIndex slot) const;
  std::vector<std::vector<std::byte>> make_images();
  ProgressHook progress();

  const Plan& plan_;
  const GradientPlan& gradient_;
  ShardTransport& transport_;
  RingExchange ring_;
  DirectExchange pieces_;
  Buffer queries_;
  Buffer carried_dq_;
  Buffer carried_dkv_;
  Buffer work_dkv_;
  Buffer workspace_;
  std::vector<PackChunk> own_kv_;
  std::vector<PackChunk> own_q_;
  GradientBinding binding_;
  StepImages images_;
  std::vector<const std::byte*> incoming_;  // piece 0 of each own kv chunk
  std::vector<DkvOp> folds_;                // of the current step; capacity for the largest
};

}  // namespace cpattn
