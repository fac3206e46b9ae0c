// The distributed forward: the one place where plan, bytes and maths meet.
#pragma once

#include <string>
#include <vector>

#include "cp/plan.h"
#include "cp/step_binding.h"
#include "cp/step_images.h"
#include "src/comm/ring_exchange.h"
#include "src/comm/shard_transport.h"
#include "src/device/memory.h"

namespace cpattn {

/// Local shard of the inputs and outputs, rows as Plan::shard() orders them, in memory of the
/// transport's device.
struct ForwardTensors {
  AnyConstTensor q;          ///< [q_rows, Hq, D]
  AnyConstTensor k;          ///< [kv_rows, Hkv, D]
  AnyConstTensor v;          ///< [kv_rows, Hkv, Dv]
  AnyTensor out;             ///< [q_rows, Hq, Dv]
  TensorView<float, 2> lse;  ///< [q_rows, Hq]
  /// [Hq], contiguous, or no data: head_maxima[h] becomes the larger of what it was and the largest
  /// visible softmax_scale * q.k of this rank's rows, in f32 (within a few units in the last
  /// place). Begin with -inf, which is what it stays where nothing was observed; a NaN stays.
  /// max_over_ranks() makes it the group's.
  TensorView<float, 1> head_maxima = {};
};

/// Owns the memory of one plan on one communicator; forward() may be called any number of times.
///
/// Thread-safety  one thread at a time, the one that uses the communicator. Two objects on two
///                communicators are independent.
class RingAttention {
 public:
  /// Collective: all ranks compare their agreement lines first and throw InvalidArgument together
  /// if any differ. `plan` and `transport` (a Communicator is one) must outlive this; the plan is
  /// read at every forward().
  RingAttention(const Plan& plan, ShardTransport& transport);

  /// Collective. Attention of this rank's query rows over all keys of their documents, by the plan.
  ///
  /// Shapes   see ForwardTensors. Dtypes as in Plan::problem(). Strides any; last dimension
  ///          contiguous; out and lse share no element with the inputs or each other.
  /// Stream   on a GPU everything is put into the order of `stream`, which may be in capture; none
  ///          on the CPU. The first call's memory is all there is.
  /// Errors   InvalidArgument on every rank, before any tensor moves, when a rank's tensors do not
  ///          fit its plan (in capture: on this rank, for nothing moves then); CommError when a
  ///          peer fails or is late.
  /// Cost     2 * Shard::visible_pairs * Hq * (D + Dv) flop; Plan::bytes_on_wire() bytes sent.
  /// Source   Ring Attention (Liu, Zaharia, Abbeel 2023); numerics: kernels/lse.h,
  /// src/base/reduction_tree.h.
  void forward(const ForwardTensors& tensors, Stream stream = {});

  const RingStats& stats() const { return exchange_.stats(); }

 private:
  void pack_own(const ForwardTensors& tensors, Stream stream);
  void run_step(std::size_t step, const ForwardTensors& tensors, Stream stream);

  const Plan& plan_;
  ShardTransport& transport_;
  RingExchange exchange_;
  Buffer carried_;
  Buffer workspace_;
  std::vector<PackChunk> own_chunks_;
  StepBinding binding_;
  StepImages images_;
};

}  // namespace cpattn
