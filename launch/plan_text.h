// A plan as text one can read.
#pragma once

#include <string>

#include "launch/plan_summary.h"

namespace cpattn {

std::string plan_text(const PlanSummary& summary);

}  // namespace cpattn
