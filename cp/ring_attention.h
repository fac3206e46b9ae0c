// The distributed forward: the one place where plan, bytes and maths meet.
#pragma once

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

/// Owns the memory of one plan on one communicator; forward() may be called any number of times and
/// allocates nothing after construction.
class RingAttention {
 public:
  /// Collective: all ranks compare their agreement lines first and throw InvalidArgument together
  /// if any differ. `plan` and `comm` must outlive this. Plan::rank()/world_size() must be those of
  /// `comm`.
  RingAttention(const Plan& plan, Communicator& comm);

  /// Collective. InvalidArgument for tensors that do not fit the plan; CommError when a peer fails
  /// or is late.
  void forward(const ForwardTensors& tensors);

  const RingStats& stats() const { return exchange_.stats(); }

 private:
  const Plan& plan_;
  Communicator& comm_;
  RingExchange exchange_;
  Buffer carried_;
  Buffer workspace_;
};

}  // namespace cpattn
