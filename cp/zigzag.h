// Where to cut a document for zigzag sharding: 2P runs of chunks, paired from the outside in, such
// that the busiest pair has least to do.
#pragma once

#include <cstdint>
#include <vector>

namespace cpattn {

/// Lengths of the runs (p, 2P-1-p), in chunks.
struct RunPair {
  std::int64_t front = 0;
  std::int64_t back = 0;
};

/// Pairs 0 .. parts-1. `work_before[c]` is the work of all chunks before chunk c, for c in [0,
/// num_chunks]. A number of chunks that 2P divides is cut evenly: the classic zigzag. Otherwise a
/// run is at most 1 shorter or 2 longer than num_chunks / 2P: late chunks of a causal document are
/// dear (of 64, the last is an eighth of what each of 4 ranks does), and cheap early ones make up
/// for them. The least peak over all such cuts is found, not approximated; among equals the evenest
/// run lengths.
///
/// Cost  O(num_chunks + P^3).
std::vector<RunPair> zigzag_pairs(const std::vector<std::int64_t>& work_before, int parts);

}  // namespace cpattn
