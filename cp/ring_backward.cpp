#include "cp/ring_gradient.h"
#include "src/base/error.h"

namespace cpattn {

RingGradient::RingGradient(const Plan& plan, const GradientPlan& gradient, Communicator& comm)
    : plan_(plan), gradient_(gradient), comm_(comm) {}

RingGradient::~RingGradient() = default;

void RingGradient::backward(const BackwardTensors& tensors) {
  static_cast<void>(tensors);
  static_cast<void>(gradient_);
  throw Unsupported(detail::concat("rank ", comm_.rank(), " of ", plan_.world_size(),
                                   ": the distributed backward is not in this build"));
}

}  // namespace cpattn
