// How a rank's results get to rank 0: one message of receipt and rows, put into global row order.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cp/sharding.h"
#include "launch/lane_result.h"

namespace cpattn {

/// What a rank sends: its receipt, then the rows of every tensor, one after the other.
std::vector<std::byte> pack_delivery(const RankReceipt& receipt,
                                     std::span<const ResultTensor> tensors);

/// Puts the rows of one rank, which owns `shard`, where they belong in `result` and counts them.
/// InternalError when the message is not what pack_delivery() made of such tensors.
void unpack_delivery(std::span<const std::byte> message, const Shard& shard, LaneResult& result);

}  // namespace cpattn
