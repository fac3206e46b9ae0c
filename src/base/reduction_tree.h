// The canonical tree over a run of numbered leaves: which partial is combined with which, decided
// once.
//
// Node (level, index) covers leaves [index * 2^level, (index + 1) * 2^level). Only leaves of a
// range [first, end) are present; a node without present leaves is absent, and its sibling takes
// the parent's place uncombined. So the shape depends on the range only, and dropping leaves at
// either end drops their operations and changes no other. Two children are combined as soon as both
// exist, whatever their order of arrival; left and right are places in the tree, never order of
// arrival.
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

/// Follows the arrival of partials (values of any id type the caller likes: here an int).
class ReductionTree {
 public:
  explicit ReductionTree(std::int64_t num_leaves) : ReductionTree(0, num_leaves) {}
  ReductionTree(std::int64_t first, std::int64_t end) : first_(first), end_(end) {}

  /// merge(left, right) -> id of the result; called for every merge that this arrival makes
  /// possible.
  using Merge = std::function<int(int left, int right)>;

  /// The partial of a leaf, or of all present leaves of a node, exists as `id`. InternalError when
  /// it existed already.
  void add(std::int64_t leaf, int id, const Merge& merge) { add(TreeNode{0, leaf}, id, merge); }
  void add(TreeNode node, int id, const Merge& merge);

  /// All present leaves are merged into one.
  bool is_complete() const;
  /// The id of the root, or -1 before is_complete().
  int root() const;
  /// Nodes that wait for a sibling.
  const std::map<TreeNode, int>& pending() const { return pending_; }

 private:
  std::int64_t begin_of(const TreeNode& node) const { return node.index << node.level; }
  std::int64_t end_of(const TreeNode& node) const { return (node.index + 1) << node.level; }
  bool exists(const TreeNode& node) const {
    return first_ < end_ && begin_of(node) < end_ && end_of(node) > first_;
  }
  bool is_root(const TreeNode& node) const {
    return begin_of(node) <= first_ && end_of(node) >= end_;
  }

  std::int64_t first_;
  std::int64_t end_;
  std::map<TreeNode, int> pending_;
};

}  // namespace cpattn
