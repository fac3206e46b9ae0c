// The distributed forward: the one place where plan, bytes and maths meet.
#pragma once

#include <string>
#include <vector>

#include "cp/plan.h"
#include "src/comm/communicator.h"
#include "src/comm/ring_exchange.h"
#include "src/device/memory.h"

namespace cpattn {

/// Local shard of the inputs and outputs, rows as Plan::shard() orders them.
struct ForwardTensors {
  AnyConstTensor q;          ///< [q_rows, Hq, D]
  AnyConstTensor k;          ///< [kv_rows, Hkv, D]
  AnyConstTensor v;          ///< [kv_rows, Hkv, Dv]
  AnyTensor out;             ///< [q_rows, Hq, Dv]
  TensorView<float, 2> lse;  ///< [q_rows, Hq]
};

/// Owns the memory of one plan on one communicator; forward() may be called any number of times.
///
/// Thread-safety  one thread at a time, the one that uses the communicator. Two objects on two
///                communicators are independent.
class RingAttention {
 public:
  /// Collective: all ranks compare their agreement lines first and throw InvalidArgument together
  /// if any differ. `plan` and `comm` must outlive this; the plan is read at every forward().
  RingAttention(const Plan& plan, Communicator& comm);

  /// Collective. Attention of this rank's query rows over all keys of their documents, by the plan.
  ///
  /// Shapes   see ForwardTensors. Dtypes as in Plan::problem(). Strides any; last dimension
  ///          contiguous; out and lse share no element with the inputs or each other.
  /// Errors   InvalidArgument on every rank, before any tensor moves, when a rank's tensors do not
  ///          fit its plan; CommError when a peer fails or is late.
  /// Cost     2 * Shard::visible_pairs * Hq * (D + Dv) flop; Plan::bytes_on_wire() bytes sent.
  /// Source   Ring Attention (Liu, Zaharia, Abbeel 2023); numerics: kernels/lse.h,
  /// src/base/reduction_tree.h.
  void forward(const ForwardTensors& tensors);

  const RingStats& stats() const { return exchange_.stats(); }

 private:
  void pack_own(const ForwardTensors& tensors);
  void run_step(const Step& step, const ForwardTensors& tensors);

  const Plan& plan_;
  Communicator& comm_;
  RingExchange exchange_;
  Buffer carried_;
  Buffer workspace_;
  std::vector<PackChunk> own_chunks_;
  std::vector<KvBlock> kv_blocks_;      // of the current step; capacity for the largest
  std::vector<QueryProgram> programs_;  // likewise
};

}  // namespace cpattn
