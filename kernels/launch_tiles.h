// LaunchTiles: how one launch of a GPU's kernels cuts a step, as numbers for those who read a plan.
#pragma once

#include <cstddef>
#include <string_view>

namespace cpattn {

/// A thread block *owns* rows of q, or of k and v, and the *others* pass by in steps.
struct LaunchTiles {
  std::string_view result;  ///< what it computes: "out", "dk, dv", "dq"
  int own_rows = 0;
  int other_rows = 0;  ///< of a step
  int block_threads = 0;
  std::size_t shared_bytes = 0;  ///< of a thread block
};

}  // namespace cpattn
