// Sharding: which rank owns which tokens. Whole chunks are dealt, per document; nothing needs to
// divide anything.
//
// Nouns. A document's tokens are cut into chunks of chunk_tokens counted from the document's start
// (the last one may be short). Queries and keys are cut and dealt separately; when both have the
// same length they fall together. Deal. contiguous: P runs of neighbouring chunks that differ by at
// most one chunk. zigzag: 2P runs, pair p = runs (p, 2P-1-p), equal when 2P divides the chunks and
// otherwise of lengths that even out the visible pairs (zigzag.h). Run or pair p of a
// document goes to rank (p + shift) mod P, the shift chosen so that the busiest rank stays least
// busy (ties: the smallest); so a pack of short documents spreads over all ranks, and one long
// document has shift 0.
#pragma once

#include <cstdint>
#include <vector>

#include "cp/config.h"
#include "kernels/shape.h"

namespace cpattn {

/// A chunk a rank owns: tokens [first, first + num_tokens) of its document, global rows from
/// row_begin, local rows from local_begin.
struct OwnedChunk {
  std::int32_t document = 0;
  std::int64_t chunk = 0;  ///< index within the document
  std::int64_t first = 0;  ///< position of its first token in the document
  std::int64_t num_tokens = 0;
  std::int64_t row_begin = 0;    ///< row in the global tensor
  std::int64_t local_begin = 0;  ///< row in the rank's shard
};

/// What one rank owns, ordered by (document, chunk); local rows follow that order without gaps.
struct Shard {
  std::vector<OwnedChunk> q;
  std::vector<OwnedChunk> kv;
  std::int64_t q_rows = 0;
  std::int64_t kv_rows = 0;
  std::int64_t visible_pairs = 0;  ///< (query, key) pairs the rank computes
};

struct Sharding {
  std::vector<Shard> shards;  ///< by rank

  /// The busiest rank's pairs over the mean (1 when there are none).
  double imbalance() const;
};

/// Pure and the same on every rank. Cost O(documents * P + chunks).
Sharding make_sharding(const SequenceBatch& batch, const CpConfig& config, int world_size);

/// Global row of every local row of a shard's q (or kv), in order.
std::vector<std::int64_t> global_rows(const std::vector<OwnedChunk>& chunks);

/// Number of visible (query, key) pairs of query positions [first, first + count) of a document.
std::int64_t visible_pairs(const Document& document, MaskKind mask, std::int64_t first,
                           std::int64_t count);

}  // namespace cpattn
