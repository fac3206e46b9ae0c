// The largest of every rank's values: for statistics such as the largest logit of a head.
#pragma once

#include <span>

#include "src/comm/communicator.h"

namespace cpattn {

/// values[i] becomes the largest values[i] of any rank, the same bits on all of them. -inf is
/// neutral ("nothing observed"), a NaN of any rank wins, +0 is larger than -0. Collective.
///
/// Shapes   as many values on every rank; InvalidArgument on all of them otherwise.
/// Errors   CommError at the deadline.
/// Cost     one all_gather of 4 * values.size() bytes.
void max_over_ranks(Communicator& comm, std::span<float> values, Clock::time_point deadline);

}  // namespace cpattn
