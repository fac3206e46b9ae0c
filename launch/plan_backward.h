// What `cpattn plan` says about the backward of one rank, as data: text and JSON are written from
// it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cp/gradient_plan.h"
#include "cp/plan.h"

namespace cpattn {

/// One rank's backward in numbers.
struct BackwardSummary {
  std::int64_t num_tasks = 0;
  std::int64_t num_sums = 0;    ///< of leaves and partial sums, on arrival too
  std::int64_t num_pieces = 0;  ///< sums of dk, dv that leave
  std::size_t bytes_on_wire = 0;
  GradientMemory memory;
};

BackwardSummary summarize_backward(const GradientPlan& gradient);

/// Q chunks [first, last] of one document whose leaves are in a sum.
struct SumRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// What a step makes of one kv chunk.
struct KvSummary {
  std::string kv;                ///< its name
  std::vector<std::string> q;    ///< the q chunks that meet it
  std::vector<SumRange> pieces;  ///< what is left of their leaves when they are summed
};

struct BackwardStepSummary {
  int kv_owner = 0;
  std::vector<KvSummary> chunks;  ///< of the owner's kv chunks those that are met
  int pieces_from = -1;           ///< -1 in step 0, whose pieces stay
  std::int64_t num_sent = 0;
  std::int64_t num_received = 0;
  std::size_t bytes_out = 0;
  std::size_t bytes_in = 0;
  std::vector<std::string>
      finished;  ///< own kv chunks whose dk, dv are whole with this step's pieces
};

std::vector<BackwardStepSummary> summarize_backward_steps(const Plan& plan,
                                                          const GradientPlan& gradient);

/// "[2-5]", or "[3]" for a single chunk.
std::string range_text(const SumRange& range);

}  // namespace cpattn
