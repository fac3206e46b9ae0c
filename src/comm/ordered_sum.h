// OrderedSum: the sum of numbered vectors over all ranks, in an order that does not depend on who
// brought which: the same bits for every number of ranks and every distribution.
//
// A trainer's sums over tokens (a weight gradient, a loss) are such sums: let the leaves be the
// chunks of the global sequence, numbered the same way at every CP size (leaf_rows() in
// cp/shard_tools.h does it), compute one partial sum per chunk, and add() it under its number.
//
// The order is the canonical tree over the leaf numbers (src/base/reduction_tree.h): two neighbours
// are added, then two neighbouring pairs, and so on; a leaf that nobody brings is left out, not
// added as zero. Every addition is one IEEE addition in T.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/reduction_tree.h"
#include "src/comm/communicator.h"

namespace cpattn {

/// T is float or double.
///
/// Memory         one vector per piece, a piece being a whole tree node whose leaves this rank has:
///                at most 2 log2(num_leaves) for every run of neighbours added in ascending order.
///                all_reduce() adds windows of all ranks' pieces, some MiB whatever the size.
/// Thread-safety  one thread at a time, the one that uses the communicator.
template <class T>
class OrderedSum {
 public:
  /// Leaves 0 .. num_leaves - 1 of `size` numbers each; both equal on all ranks. InvalidArgument
  /// when one is negative, or num_leaves above 2^62.
  OrderedSum(std::int64_t num_leaves, std::int64_t size);

  /// Brings a leaf; `values` is copied. Any order; ascending needs least memory. Never throws for a
  /// wrong leaf, a repeated leaf or a wrong size: all_reduce() refuses them on every rank.
  void add(std::int64_t leaf, std::span<const T> values);

  /// Brings a refusal instead, for bindings whose arguments are no leaf at all: all_reduce() throws
  /// InvalidArgument with it on every rank. The first one of a rank is kept.
  void refuse(const std::string& why);

  /// Collective. `result`, of `size` numbers, becomes the sum of all leaves that any rank brought
  /// (zeros when there are none). Afterwards the sum is empty and can be filled again.
  ///
  /// Errors  InvalidArgument on every rank, with the same text, before any number moves: what any
  ///         rank refused; sizes that differ between ranks; a leaf out of range or brought twice.
  ///         The sum is empty then, too. CommError at `deadline`.
  /// Cost    a rank sends its pieces, less the slice it adds up itself, and its slice of the result
  ///         to everyone: sizeof(T) * size * (P - 1) / P * (pieces + 1) bytes, and one small
  ///         message to each rank.
  void all_reduce(Communicator& comm, std::span<T> result, Clock::time_point deadline);

  std::int64_t num_leaves() const { return num_leaves_; }
  std::int64_t size() const { return size_; }
  /// Vectors that add() took memory for so far.
  std::size_t num_vectors() const { return values_.size(); }

 private:
  bool has(std::int64_t leaf) const;
  void clear();

  std::int64_t num_leaves_;
  std::int64_t size_;
  ReductionTree tree_;
  std::vector<std::vector<T>> values_;  // by the tree's ids
  std::vector<int> free_;
  std::string refusal_;
};

}  // namespace cpattn
