// Packs of documents that tests of cp/ run through: every shape that has gone wrong for somebody.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/shape.h"
#include "tests/support/random.h"

namespace cpattn::testing {

struct NamedBatch {
  std::string name;
  SequenceBatch batch;
};

/// Cumulative lengths from lengths.
inline std::vector<std::int64_t> cumulative(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

/// Documents of q and kv lengths, one after the other, without gaps.
inline SequenceBatch pack(const std::vector<std::int64_t>& q_lengths,
                          const std::vector<std::int64_t>& kv_lengths) {
  const auto q = cumulative(q_lengths), kv = cumulative(kv_lengths);
  return batch_from_cu_seqlens(q, kv, q.back(), kv.back());
}
inline SequenceBatch pack(const std::vector<std::int64_t>& lengths) {
  return pack(lengths, lengths);
}

/// Small packs: lengths that no chunk divides, unequal sides, empty documents, padding, no tokens.
inline std::vector<NamedBatch> small_batches() {
  return {{"one token", batch_of_one(1, 1)},
          {"67 tokens", batch_of_one(67, 67)},
          {"128 tokens", batch_of_one(128, 128)},
          {"tail of 23 over 61", batch_of_one(23, 61)},
          {"61 queries over 23", batch_of_one(61, 23)},
          {"queries without keys", batch_of_one(19, 0)},
          {"keys without queries", batch_of_one(0, 19)},
          {"nothing", batch_of_one(0, 0)},
          {"no documents", {{}, 0, 0}},
          {"pack", pack({31, 0, 7, 64, 1, 0})},
          {"unequal pack", pack({0, 3, 0, 40, 12}, {2, 3, 5, 64, 0})},
          {"padded", batch_from_padded({0, 10, 15, 15, 60}, {7, 5, 0, 33}, 64)}};
}

/// `count` documents of random lengths in [0, longest], q and kv alike.
inline SequenceBatch random_pack(std::uint64_t seed, std::int64_t count, std::int64_t longest) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i)
    lengths.push_back(random_integer(seed, static_cast<std::uint64_t>(i), 0, longest));
  return pack(lengths);
}

}  // namespace cpattn::testing
