// Tools for the code around the attention: everything that follows tokens to their ranks.
//
// A rank's rows are a list of OwnedChunk: Shard::q for queries, Shard::kv for keys and values
// (`plan->plan().shard()`, or make_sharding() without any plan). Where both have the same lengths,
// as in self-attention, both lists are equal. All functions are pure unless they take a
// Communicator, and refuse with InvalidArgument what does not fit, before anything is written.
//
//   const auto& rows = planned->plan().shard().q;
//   shard_rows(q_global, rows, q_local);            // [T, Hq, D] -> [local, Hq, D]
//   std::vector<std::int64_t> rope = positions(rows);
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cp/config.h"
#include "cp/sharding.h"
#include "kernels/shape.h"
#include "src/base/error.h"
#include "src/base/tensor_view.h"
#include "src/comm/communicator.h"

namespace cpattn {

/// Rows of the rank: the sum of its chunks.
std::int64_t num_rows(const std::vector<OwnedChunk>& chunks);

/// "" when the rows of `chunks` can be copied between the two; else what does not fit, by tensor.
std::string rows_misfit(const AnyConstTensor& global, const AnyConstTensor& local,
                        const std::vector<OwnedChunk>& chunks);

/// local row i = the i-th owned row of `global`. Element types, heads and channels must be equal;
/// strides are free, but for the last dimension, which is contiguous.
void shard_rows(const AnyConstTensor& global, const std::vector<OwnedChunk>& chunks,
                const AnyTensor& local);

/// The way back for one rank: owned rows of `global` become the rows of `local`; others keep what
/// they have.
void unshard_rows(const AnyConstTensor& local, const std::vector<OwnedChunk>& chunks,
                  const AnyTensor& global);

/// The same for values of any type, one per row: token ids, labels, loss weights.
template <class T>
std::vector<T> shard_values(std::span<const T> global, const std::vector<OwnedChunk>& chunks) {
  std::vector<T> local;
  local.reserve(static_cast<std::size_t>(num_rows(chunks)));
  for (const OwnedChunk& chunk : chunks) {
    require(chunk.row_begin + chunk.num_tokens <= static_cast<std::int64_t>(global.size()),
            "values: ", global.size(), " of them, expected at least ",
            chunk.row_begin + chunk.num_tokens);
    const auto own = global.subspan(static_cast<std::size_t>(chunk.row_begin),
                                    static_cast<std::size_t>(chunk.num_tokens));
    local.insert(local.end(), own.begin(), own.end());
  }
  return local;
}

enum class ShardSide { q, kv };

/// Collective: every rank brings its rows of one tensor and gets all of them. Rows that no document
/// covers keep what they have.
///
/// Errors  InvalidArgument on every rank when any tensor does not fit or sides differ; CommError at
///         `deadline`.
/// Cost    every rank sends its rows to every other, and holds the whole tensor twice: for
///         checkpoints and tests, not for every step.
void all_gather_rows(Communicator& comm, const Sharding& sharding, ShardSide side,
                     const AnyConstTensor& local, const AnyTensor& global,
                     Clock::time_point deadline);

/// Takes part in the other ranks' all_gather_rows() only to refuse it: InvalidArgument on every
/// rank. For bindings, whose own arguments may be wrong before there are tensors to pass.
void refuse_all_gather_rows(Communicator& comm, std::string_view why, Clock::time_point deadline);

/// Of each local row, its position in its document, from 0: what RoPE rotates keys by, and queries
/// too where a document has as many queries as keys.
std::vector<std::int64_t> positions(const std::vector<OwnedChunk>& chunks);

/// Of each local q row, the position of the last key it sees under a causal mask: its own position
/// plus kv_tokens - q_tokens. What RoPE rotates queries by when earlier keys came from elsewhere (a
/// prompt in pieces, a cache).
std::vector<std::int64_t> query_positions(const SequenceBatch& batch,
                                          const std::vector<OwnedChunk>& q_chunks);

/// Cumulative lengths of what the rank has of each document: documents + 1 numbers from 0. A
/// document it has nothing of is empty.
std::vector<std::int64_t> local_cu_seqlens(std::int64_t num_documents,
                                           const std::vector<OwnedChunk>& chunks);

/// What -100 means to a cross-entropy: no target.
inline constexpr std::int64_t kIgnoreTarget = -100;

/// Of each local q row, the token that follows it in its document, whoever owns that; `ignore` at
/// the document's end. `tokens` are those of the global q rows.
std::vector<std::int64_t> next_token_targets(std::span<const std::int64_t> tokens,
                                             const SequenceBatch& batch,
                                             const std::vector<OwnedChunk>& q_chunks,
                                             std::int64_t ignore = kIgnoreTarget);

/// Local rows [begin, begin + num_rows) are one leaf of an OrderedSum over the tokens.
struct LeafRows {
  std::int64_t leaf = 0;
  std::int64_t begin = 0;
  std::int64_t num_rows = 0;
};

/// The leaves of a rank's q rows: its chunks, numbered through all documents of the batch. A sum
/// over tokens that adds up each leaf's rows on its own, in order, and then the leaves by
/// OrderedSum(num_leaves(...), ...) has the same bits for every number of ranks, provided that the
/// chunks are the same: always for contiguous and zigzag, and when Plan::guarantee() says so for
/// dual_chunk.
std::vector<LeafRows> leaf_rows(const SequenceBatch& batch, const CpConfig& config, int world_size,
                                const std::vector<OwnedChunk>& q_chunks);
std::int64_t num_leaves(const SequenceBatch& batch, const CpConfig& config, int world_size);

}  // namespace cpattn
