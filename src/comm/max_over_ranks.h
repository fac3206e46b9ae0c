// The largest of every rank's values: for statistics such as the largest logit of a head.
#pragma once

#include <span>
#include <string_view>

#include "src/comm/communicator.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

/// values[i] becomes the largest values[i] of any rank, the same bits on all of them. -inf is
/// neutral ("nothing observed"), a NaN of any rank wins, +0 is larger than -0. Collective.
///
/// Shapes   as many values on every rank; InvalidArgument on all of them otherwise.
/// Errors   CommError at the deadline.
/// Cost     one all_gather of 4 * values.size() bytes.
void max_over_ranks(Communicator& comm, std::span<float> values, Clock::time_point deadline);

/// The same of values in the memory of the group's device, in place. Waits for what `stream` was
/// given before; the result is there for every stream when it returns.
///
/// Errors   also InvalidArgument on every rank for an address or a stream that the device must not
///          be given; a stream in capture, whose work is not done, on this rank alone.
void max_over_ranks(ShardTransport& group, std::span<float> values, Stream stream,
                    Clock::time_point deadline);

/// Takes part in the other ranks' max_over_ranks() of a ShardTransport only to refuse it:
/// InvalidArgument on every rank. For bindings, whose own arguments may be wrong.
void refuse_max_over_ranks(Communicator& comm, std::string_view why, Clock::time_point deadline);

}  // namespace cpattn
