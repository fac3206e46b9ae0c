// What RingAttention and RingGradient do before their first byte moves.
#pragma once

#include <string_view>

#include "cp/plan.h"
#include "src/comm/communicator.h"
#include "src/comm/ring_exchange.h"

namespace cpattn {

RingOptions ring_options(const Plan& plan);

/// `comm`, once all ranks are known to have made the same plan: all of `lines` are equal.
/// Collective; InvalidArgument on every rank otherwise.
Communicator& agreed(const Plan& plan, std::string_view lines, Communicator& comm);

/// What every forward() and backward() begins with: all ranks hear what any of them refuses of its
/// tensors. Collective; InvalidArgument on every rank unless all texts are empty.
void refuse_tensors_together(const Plan& plan, Communicator& comm, std::string_view mine);

}  // namespace cpattn
