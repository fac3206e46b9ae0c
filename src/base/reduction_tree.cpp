#include "src/base/reduction_tree.h"

#include "src/base/error.h"

namespace cpattn {

void ReductionTree::add(TreeNode node, int id, const Merge& merge) {
  invariant(exists(node), "node (", node.level, ", ", node.index, ") of a tree over [", first_,
            ", ", end_, ")");
  while (!is_root(node)) {
    const TreeNode sibling{node.level, node.index ^ 1};
    if (exists(sibling)) {
      const auto other = pending_.find(sibling);
      if (other == pending_.end()) break;  // wait here
      const bool is_left = (node.index & 1) == 0;
      id = is_left ? merge(id, other->second) : merge(other->second, id);
      pending_.erase(other);
    }
    node = {node.level + 1, node.index >> 1};
  }
  invariant(pending_.emplace(node, id).second, "node (", node.level, ", ", node.index,
            ") arrived twice");
}

bool ReductionTree::is_complete() const {
  return pending_.size() == 1 && is_root(pending_.begin()->first);
}

int ReductionTree::root() const { return is_complete() ? pending_.begin()->second : -1; }

}  // namespace cpattn
