// What one attention problem looks like, independent of how it is split: heads, head sizes, scale,
// documents.
#pragma once

#include <cstdint>
#include <vector>

namespace cpattn {

/// q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], v [T, num_kv_heads, value_dim].
/// Query head h reads kv head h / (num_heads / num_kv_heads).
struct AttentionShape {
  std::int64_t num_heads = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 64;
  double softmax_scale =
      0.125;  ///< multiplies q.k once, in block_forward; any finite value, 0 and negative included

  std::int64_t group_size() const { return num_heads / num_kv_heads; }
};

inline constexpr std::int64_t kMaxHeadDim = 256;

/// One packed document: rows [q_begin, q_begin + q_tokens) of q attend to rows [kv_begin, kv_begin
/// + kv_tokens) of k, v. Either count may be zero.
struct Document {
  std::int64_t q_begin = 0;
  std::int64_t q_tokens = 0;
  std::int64_t kv_begin = 0;
  std::int64_t kv_tokens = 0;
};

/// A pack of documents over q tensors of q_rows rows and k, v tensors of kv_rows rows. Rows that no
/// document covers are padding: they are never read, and their out is 0 and lse -inf.
struct SequenceBatch {
  std::vector<Document> documents;
  std::int64_t q_rows = 0;
  std::int64_t kv_rows = 0;
};

/// Documents from cumulative lengths (as in flash_attn_varlen: cu[0] = 0, non-decreasing, the last
/// one at most the number of rows; equal neighbours are an empty document). InvalidArgument names
/// the array and the offending index.
SequenceBatch batch_from_cu_seqlens(const std::vector<std::int64_t>& cu_seqlens_q,
                                    const std::vector<std::int64_t>& cu_seqlens_kv,
                                    std::int64_t q_rows, std::int64_t kv_rows);

/// The same with padding inside: document d starts at padded[d] and has lengths[d] real tokens
/// (Transformer Engine's cu_seqlens_padded). InvalidArgument when a length exceeds its slot.
SequenceBatch batch_from_padded(const std::vector<std::int64_t>& cu_seqlens_padded,
                                const std::vector<std::int64_t>& lengths, std::int64_t rows);

/// One document of q_tokens queries over kv_tokens keys.
SequenceBatch batch_of_one(std::int64_t q_tokens, std::int64_t kv_tokens);

/// Checks the invariants above plus disjointness of documents; InvalidArgument otherwise.
void validate(const SequenceBatch& batch);
void validate(const AttentionShape& shape);

}  // namespace cpattn
