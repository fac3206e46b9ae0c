#include "cp/te_names.h"

#include <algorithm>
#include <string_view>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::te {
namespace {

void check_cu_seqlens(const CuSeqlens& cu_seqlens, std::string_view name) {
  require(!cu_seqlens.empty() && cu_seqlens[0] == 0, name, ": expected to begin with 0");
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i)
    require(cu_seqlens[i] >= cu_seqlens[i - 1], name, "[", i, "] is ", cu_seqlens[i],
            ", expected at least ", cu_seqlens[i - 1]);
}

void check_rank(int rank, int world_size) {
  require(world_size >= 1 && rank >= 0 && rank < world_size, "rank ", rank, " of world_size ",
          world_size, ": expected 0 <= rank < world_size");
}

void check_count(std::int64_t count, std::int64_t expected, std::string_view name) {
  require(count == expected, name, ": ", count, " values, expected ", expected);
}

/// Calls visit(first, last) for the runs of global rows that a rank holds, in its order.
template <class Visitor>
void for_each_run(const CuSeqlens& cu_seqlens_padded, int world_size, int rank,
                  const Visitor& visit) {
  check_cu_seqlens(cu_seqlens_padded, "cu_seqlens_padded");
  check_rank(rank, world_size);
  for (std::size_t i = 0; i + 1 < cu_seqlens_padded.size(); ++i) {
    const std::int64_t begin = cu_seqlens_padded[i], length = cu_seqlens_padded[i + 1] - begin;
    if (world_size == 1) {
      visit(begin, begin + length);
      continue;
    }
    const std::int64_t parts = 2 * std::int64_t{world_size};
    require(length % parts == 0, "sequence ", i, " has a padded length of ", length,
            ", expected a multiple of ", parts);
    for (const std::int64_t part : {std::int64_t{rank}, parts - 1 - rank}) {
      const std::int64_t first = begin + part * (length / parts);
      visit(first, first + length / parts);
    }
  }
}

std::vector<std::int64_t> padded(std::span<const std::int64_t> values, const CuSeqlens& cu_seqlens,
                                 const CuSeqlens& cu_padded, std::int64_t padding) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(cu_padded.back()), padding);
  for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i)
    std::copy(values.begin() + cu_seqlens[i], values.begin() + cu_seqlens[i + 1],
              result.begin() + cu_padded[i]);
  return result;
}

}  // namespace

std::vector<std::int64_t> thd_get_partitioned_indices(const CuSeqlens& cu_seqlens_padded,
                                                      std::int64_t total_tokens, int world_size,
                                                      int rank) {
  std::vector<std::int64_t> rows;
  for_each_run(cu_seqlens_padded, world_size, rank, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) rows.push_back(row);
  });
  check_count(total_tokens, cu_seqlens_padded.back(), "total_tokens");
  return rows;
}

CuSeqlens get_cu_seqlens_on_cp_rank(const CuSeqlens& cu_seqlens,
                                    const CuSeqlens& cu_seqlens_padded_on_cp_rank, int cp_size,
                                    int cp_rank, bool first_half, bool second_half) {
  check_cu_seqlens(cu_seqlens, "cu_seqlens");
  check_cu_seqlens(cu_seqlens_padded_on_cp_rank, "cu_seqlens_padded_on_cp_rank");
  check_rank(cp_rank, cp_size);
  check_count(static_cast<std::int64_t>(cu_seqlens_padded_on_cp_rank.size()),
              static_cast<std::int64_t>(cu_seqlens.size()), "cu_seqlens_padded_on_cp_rank");
  CuSeqlens result{0};
  for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    const std::int64_t length = cu_seqlens[i + 1] - cu_seqlens[i];
    const std::int64_t slot = cu_seqlens_padded_on_cp_rank[i + 1] - cu_seqlens_padded_on_cp_rank[i];
    require(slot % 2 == 0, "sequence ", i, " has ", slot,
            " padded tokens on a rank, expected an even number");
    require(length <= slot * cp_size, "sequence ", i, " has ", length,
            " tokens, expected at most its padded length of ", slot * cp_size);
    const std::int64_t part = slot / 2;
    const auto valid_of = [&](std::int64_t index) {
      return std::clamp<std::int64_t>(length - index * part, 0, part);
    };
    const std::int64_t valid = (first_half ? valid_of(cp_rank) : 0) +
                               (second_half ? valid_of(2 * cp_size - 1 - cp_rank) : 0);
    result.push_back(result.back() + valid);
  }
  return result;
}

CuSeqlens padded_cu_seqlens(const CuSeqlens& cu_seqlens, std::int64_t divisibility_factor) {
  check_cu_seqlens(cu_seqlens, "cu_seqlens");
  require(divisibility_factor >= 1, "divisibility_factor ", divisibility_factor,
          ": expected at least 1");
  CuSeqlens result{0};
  for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i)
    result.push_back(result.back() +
                     round_up(cu_seqlens[i + 1] - cu_seqlens[i], divisibility_factor));
  return result;
}

PaddedSequences pad_thd_sequences_for_cp(std::span<const std::int64_t> input_ids,
                                         std::span<const std::int64_t> labels,
                                         const CuSeqlens& cu_seqlens,
                                         std::int64_t divisibility_factor,
                                         std::int64_t padding_token_id,
                                         std::int64_t padding_label_id) {
  const CuSeqlens cu_padded = padded_cu_seqlens(cu_seqlens, divisibility_factor);
  check_count(static_cast<std::int64_t>(input_ids.size()), cu_seqlens.back(), "input_ids");
  check_count(static_cast<std::int64_t>(labels.size()), cu_seqlens.back(), "labels");
  return {padded(input_ids, cu_seqlens, cu_padded, padding_token_id),
          padded(labels, cu_seqlens, cu_padded, padding_label_id), cu_padded};
}

std::vector<std::int64_t> generate_positional_ids_for_cp(const CuSeqlens& cu_seqlens,
                                                         std::int64_t divisibility_factor) {
  const CuSeqlens cu_padded = padded_cu_seqlens(cu_seqlens, divisibility_factor);
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i + 1 < cu_padded.size(); ++i)
    for (std::int64_t id = 0; id < cu_padded[i + 1] - cu_padded[i]; ++id) ids.push_back(id);
  return ids;
}

RankBatch get_batch_on_this_cp_rank(const CuSeqlens& cu_seqlens_padded,
                                    std::span<const std::int64_t> input_ids,
                                    std::span<const std::int64_t> labels,
                                    std::span<const std::int64_t> position_ids, int cp_size,
                                    int cp_rank) {
  check_cu_seqlens(cu_seqlens_padded, "cu_seqlens_padded");
  RankBatch batch;
  const auto take = [&](std::span<const std::int64_t> values, std::string_view name,
                        std::vector<std::int64_t>& own) {
    check_count(static_cast<std::int64_t>(values.size()), cu_seqlens_padded.back(), name);
    for_each_run(cu_seqlens_padded, cp_size, cp_rank, [&](std::int64_t first, std::int64_t last) {
      own.insert(own.end(), values.begin() + first, values.begin() + last);
    });
  };
  take(input_ids, "input_ids", batch.input_ids);
  take(labels, "labels", batch.labels);
  take(position_ids, "position_ids", batch.position_ids);
  return batch;
}

}  // namespace cpattn::te
