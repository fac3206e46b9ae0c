// Sharding: which rank owns which tokens. Whole chunks are dealt, per document; nothing needs to
// divide anything.
//
// Nouns. A document's tokens are cut into chunks of chunk_tokens counted from the document's start
// (the last one may be short). Queries and keys are cut and dealt separately; when both have the
// same length they fall together. Deal. contiguous: P runs of neighbouring chunks that differ by at
// most one chunk. zigzag: 2P runs, pair p = runs (p, 2P-1-p), equal when 2P divides the chunks and
// otherwise of lengths that even out the visible pairs (zigzag.h). Run or pair p of a document goes
// to rank (p + shift) mod P, the shift chosen so that the busiest rank stays least busy (ties: the
// smallest); so a pack of short documents spreads over all ranks, and one long document has shift
// 0. dual_chunk: a layout that exists already: each document is 2P parts of equal length, rank r
// owns parts r and 2P-1-r, there is no shift, and lengths that 2P does not divide are refused (but
// for P = 1, where nothing is divided).
#pragma once

#include <cstdint>
#include <vector>

#include "cp/config.h"
#include "kernels/shape.h"

namespace cpattn {

/// Where the chunks of one sequence begin: the queries or the keys of a document. They are counted
/// from its start; where a border between shards falls inside a chunk (dual_chunk only), from the
/// start of each of its 2P parts.
struct ChunkGrid {
  std::int64_t tokens = 0;
  std::int64_t chunk_tokens = 1;
  std::int64_t part_tokens = 0;  ///< `tokens` when there are no parts

  std::int64_t chunks_per_part() const;
  std::int64_t num_chunks() const;
  std::int64_t begin(std::int64_t chunk) const;  ///< `tokens` for num_chunks()
  std::int64_t end(std::int64_t chunk) const;
  std::int64_t chunk_at(std::int64_t token) const;
  /// Whether a border of a part falls inside what would be a chunk of the undivided sequence.
  bool is_fragmented() const { return part_tokens < tokens && part_tokens % chunk_tokens != 0; }
};

ChunkGrid chunk_grid(std::int64_t tokens, const CpConfig& config, int world_size);

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

/// InvalidArgument names every document that the sharding cannot divide.
void check_divisible(const SequenceBatch& batch, const CpConfig& config, int world_size);

/// Pure and the same on every rank. Cost O(documents * P + chunks). Errors as check_divisible().
Sharding make_sharding(const SequenceBatch& batch, const CpConfig& config, int world_size);

/// A number that differs, but for chance, when any rank owns anything else.
std::uint64_t digest_of(const Sharding& sharding);

/// Global row of every local row of a shard's q (or kv), in order.
std::vector<std::int64_t> global_rows(const std::vector<OwnedChunk>& chunks);

/// Number of visible (query, key) pairs of query positions [first, first + count) of a document.
std::int64_t visible_pairs(const Document& document, MaskKind mask, std::int64_t first,
                           std::int64_t count);

}  // namespace cpattn
