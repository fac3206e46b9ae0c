// What became of a job, from all that is known of it: what its ranks said, what they did not say,
// what mpirun printed and how it ended.
#pragma once

#include <string>
#include <vector>

#include "launch/job_files.h"
#include "launch/process.h"
#include "launch/report.h"

namespace cpattn {

struct JobEnd {
  FailureKind failure = FailureKind::none;
  std::vector<std::string> reasons;  ///< empty only when nothing went wrong
};

/// What an exit code of ours (or another one) that is not 0 amounts to.
FailureKind failure_kind(int exit_code);

/// No failure only if every rank started and said that it ended well, and the job ended with 0.
/// Pure.
JobEnd explain(const ProcessOutcome& outcome, const std::vector<RankRecord>& records);

}  // namespace cpattn
