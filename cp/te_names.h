// Data helpers under the names that users of Transformer Engine know, with the same meaning: packed
// ("thd") sequences in the dual-chunk layout, where sequence i of padded length L_i is 2P parts of
// L_i / 2P tokens and rank r holds parts r and 2P-1-r. Our own tools (cp/shard_tools.h) do the same
// for every sharding; these exist so that a data pipeline written for that layout keeps its calls
// when it moves to CpConfig::sharding = dual_chunk.
//
// cu_seqlens: cumulative lengths from 0, sequences + 1 of them. All functions are pure; what does
// not fit is InvalidArgument, a padded length that 2P does not divide included (one rank alone
// divides nothing).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cpattn::te {

using CuSeqlens = std::vector<std::int64_t>;

/// Global rows of a rank, in its order: cu_seqlens_padded.back() / world_size of them.
/// `total_tokens` must be cu_seqlens_padded.back().
std::vector<std::int64_t> thd_get_partitioned_indices(const CuSeqlens& cu_seqlens_padded,
                                                      std::int64_t total_tokens, int world_size,
                                                      int rank);

/// Cumulative *valid* lengths on a rank, of its first and/or second part of every sequence, when
/// padding is at each sequence's end. `cu_seqlens_padded_on_cp_rank` is cu_seqlens_padded / P.
CuSeqlens get_cu_seqlens_on_cp_rank(const CuSeqlens& cu_seqlens,
                                    const CuSeqlens& cu_seqlens_padded_on_cp_rank, int cp_size,
                                    int cp_rank, bool first_half, bool second_half);

/// Every sequence's length rounded up to a multiple.
CuSeqlens padded_cu_seqlens(const CuSeqlens& cu_seqlens, std::int64_t divisibility_factor);

struct PaddedSequences {
  std::vector<std::int64_t> input_ids;
  std::vector<std::int64_t> labels;
  CuSeqlens cu_seqlens_padded;
};

/// Pads every sequence at its end to a multiple of `divisibility_factor` (2P, say).
PaddedSequences pad_thd_sequences_for_cp(std::span<const std::int64_t> input_ids,
                                         std::span<const std::int64_t> labels,
                                         const CuSeqlens& cu_seqlens,
                                         std::int64_t divisibility_factor,
                                         std::int64_t padding_token_id = 0,
                                         std::int64_t padding_label_id = -100);

/// 0, 1, 2, ... within every padded sequence.
std::vector<std::int64_t> generate_positional_ids_for_cp(const CuSeqlens& cu_seqlens,
                                                         std::int64_t divisibility_factor);

struct RankBatch {
  std::vector<std::int64_t> input_ids;
  std::vector<std::int64_t> labels;
  std::vector<std::int64_t> position_ids;
};

/// A rank's part of a padded batch; each argument has cu_seqlens_padded.back() values.
RankBatch get_batch_on_this_cp_rank(const CuSeqlens& cu_seqlens_padded,
                                    std::span<const std::int64_t> input_ids,
                                    std::span<const std::int64_t> labels,
                                    std::span<const std::int64_t> position_ids, int cp_size,
                                    int cp_rank);

}  // namespace cpattn::te
