// What RingAttention and RingGradient do before their first byte moves.
#pragma once

#include <string_view>
#include <vector>

#include "cp/plan.h"
#include "kernels/block_attention.h"
#include "src/comm/ring_exchange.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

RingOptions ring_options(const Plan& plan);

/// Own chunks and where each is packed.
std::vector<PackChunk> pack_chunks(const std::vector<OwnedChunk>& own,
                                   const std::vector<std::size_t>& offsets);

/// `transport`, once all ranks are known to have made the same plan: all of `lines` are equal, and
/// every rank's kernels are for the device of its transport. Collective; InvalidArgument on every
/// rank otherwise.
ShardTransport& agreed(const Plan& plan, std::string_view lines, ShardTransport& transport);

enum class Pass { forward, backward };

/// What every forward() and backward() begins with: all ranks hear what any of them refuses of its
/// tensors or its stream. Collective; InvalidArgument on every rank unless all texts are empty;
/// CommError where ranks make another pass, or call a plan that is not equal: what they would
/// exchange may well be of one size. While `stream` is in capture nothing moves on any rank, so
/// then a rank refuses alone; that includes transports that cannot be captured.
void refuse_tensors_together(const Plan& plan, Pass pass, ShardTransport& transport,
                             std::string_view mine, Stream stream);

/// The same of a call that cannot even be stated, for `why`, which is not empty; always throws.
/// Where `stream` is not known, none: then it is taken for one that is not in capture.
[[noreturn]] void refuse_call(const Plan& plan, Pass pass, ShardTransport& transport,
                              std::string_view why, Stream stream);

}  // namespace cpattn
