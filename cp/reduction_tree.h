// The canonical tree over the chunks of one document: which partial is merged with which, decided
// once.
//
// Node (level, index) covers chunks [index * 2^level, (index + 1) * 2^level); a missing right
// sibling promotes the left child. The shape depends on the number of chunks only, and is
// prefix-stable: the tree of n chunks cut to its first k is the tree of k chunks. A merge happens
// as soon as both children exist, whatever their order of arrival; left and right are places in the
// tree, never order of arrival.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

namespace cpattn {

struct TreeNode {
  int level = 0;
  std::int64_t index = 0;
  auto operator<=>(const TreeNode&) const = default;
};

/// Follows the arrival of chunk partials (values of any id type the caller likes: here an int).
class ReductionTree {
 public:
  explicit ReductionTree(std::int64_t num_chunks) : num_chunks_(num_chunks) {}

  /// merge(left, right) -> id of the result; called for every merge that this arrival makes
  /// possible.
  using Merge = std::function<int(int left, int right)>;

  /// The partial of `chunk` exists as `id`. InternalError when it existed already.
  void add(std::int64_t chunk, int id, const Merge& merge);

  /// All chunks are merged into one.
  bool is_complete() const;
  /// The id of the root, or -1 before is_complete().
  int root() const;
  /// Nodes that wait for a sibling.
  const std::map<TreeNode, int>& pending() const { return pending_; }

 private:
  bool exists(const TreeNode& node) const { return (node.index << node.level) < num_chunks_; }
  bool is_root(const TreeNode& node) const {
    return node.index == 0 && (std::int64_t{1} << node.level) >= num_chunks_;
  }

  std::int64_t num_chunks_;
  std::map<TreeNode, int> pending_;
};

}  // namespace cpattn
