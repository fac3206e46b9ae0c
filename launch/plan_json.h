// A plan as JSON: the numbers of plan_text, exact and complete.
#pragma once

#include <span>
#include <string>

#include "launch/plan_summary.h"

namespace cpattn {

/// {"plans": [...]}, one object for every lane and size.
std::string plan_json(std::span<const PlanSummary> summaries);

}  // namespace cpattn
