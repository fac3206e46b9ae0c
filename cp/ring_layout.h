// RingLayout: how the packed kv chunks of a shard lie in the span that travels round the ring, and
// how much of a span goes on from where.
//
// A chunk travels as far as the last rank that sees any of it, and no further: its *reach* in hops.
// Spans hold their chunks by falling reach, so what goes on is the beginning of what came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cp/sharding.h"
#include "kernels/block_attention.h"
#include "src/comm/ring_exchange.h"

namespace cpattn {

/// Hops of every chunk of every rank's Shard::kv: 0 where nobody else sees it, P - 1 at most.
using Reach = std::vector<std::vector<std::int32_t>>;

/// Pure and the same on every rank. Cost O(n log n) for n chunks of all ranks.
Reach make_reach(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config,
                 int direction);

/// Steps after which nobody sees anything more: 1 + the longest reach, P at most.
int num_ring_steps(const Reach& reach);

/// A packed kv chunk within its owner's span.
struct PlacedChunk {
  std::size_t offset = 0;
  std::int64_t num_keys = 0;
  std::int32_t reach = 0;
};

class RingLayout {
 public:
  RingLayout() = default;
  /// Of rank `rank`; `packed_bytes` is of a chunk with so many keys.
  RingLayout(const Sharding& sharding, const Reach& reach, int rank, int direction,
             const std::function<std::size_t(std::int64_t num_keys)>& packed_bytes);

  /// An owner's chunks, one per Shard::kv entry.
  const std::vector<PlacedChunk>& chunks(int owner) const {
    return chunks_[static_cast<std::size_t>(owner)];
  }
  /// Where each of them begins in the span.
  std::vector<std::size_t> offsets(int owner) const;
  /// Of an owner's whole span, by owner.
  const std::vector<std::size_t>& span_bytes() const { return span_bytes_; }
  /// What this rank holds and passes on, in num_ring_steps().
  const RingBytes& bytes() const { return bytes_; }
  /// Payload bytes this rank sends in one pass.
  std::size_t bytes_sent() const;

  /// The owner's chunks as the kernels take them `step` hops from it, given where its span is;
  /// those that did not come so far have no keys.
  void bind(int owner, std::size_t step, const std::byte* span, std::vector<KvBlock>& blocks) const;

 private:
  std::vector<std::vector<PlacedChunk>> chunks_;
  std::vector<std::size_t> span_bytes_;
  RingBytes bytes_;
};

}  // namespace cpattn
