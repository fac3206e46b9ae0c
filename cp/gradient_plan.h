// GradientPlan: what the backward of a Plan adds to it: who folds which leaves of dq, dk, dv in
// which step, which pieces travel home when, and the memory this takes. Pure host data.
#pragma once

#include <cstddef>

#include "cp/plan.h"

namespace cpattn {

class GradientPlan {
 public:
  /// Pure, like Plan; reads `plan` only here.
  explicit GradientPlan(const Plan& plan);

  /// Payload bytes this rank sends in one backward: kv shards and pieces of dk, dv.
  std::size_t bytes_on_wire() const;
  /// Bytes this rank needs beyond the caller's tensors.
  std::size_t memory_bytes() const;
};

}  // namespace cpattn
