#include "cp/gradient_plan.h"

namespace cpattn {

GradientPlan::GradientPlan(const Plan& plan) { static_cast<void>(plan); }

std::size_t GradientPlan::bytes_on_wire() const { return 0; }
std::size_t GradientPlan::memory_bytes() const { return 0; }

}  // namespace cpattn
