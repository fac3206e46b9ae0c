#include "cp/reduction_tree.h"

#include "src/base/error.h"

namespace cpattn {

void ReductionTree::add(std::int64_t chunk, int id, const Merge& merge) {
  invariant(chunk >= 0 && chunk < num_chunks_, "chunk ", chunk, " of a tree of ", num_chunks_);
  TreeNode node{0, chunk};
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
  invariant(pending_.emplace(node, id).second, "chunk ", chunk, " arrived twice");
}

bool ReductionTree::is_complete() const {
  return pending_.size() == 1 && is_root(pending_.begin()->first);
}

int ReductionTree::root() const { return is_complete() ? pending_.begin()->second : -1; }

}  // namespace cpattn
