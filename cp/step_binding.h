// StepBinding: a step of the forward as the kernels take it, from the plan and the address of the
// span that is worked on.
#pragma once

#include <cstddef>
#include <vector>

#include "cp/plan.h"
#include "kernels/block_attention.h"

namespace cpattn {

class StepBinding {
 public:
  /// Room for the largest step: bind() allocates nothing.
  explicit StepBinding(const Plan& plan);

  void bind(std::size_t step, const std::byte* span);
  const std::vector<KvBlock>& kv_blocks() const { return kv_blocks_; }
  const std::vector<QueryProgram>& programs() const { return programs_; }

  /// The images of all steps, given where the span of each will be; none for kernels without.
  template <class SpanAt>
  std::vector<std::vector<std::byte>> make_images(const SpanAt& span_at) {
    std::vector<std::vector<std::byte>> images;
    if (plan_.kernels().step_image == nullptr) return images;
    for (std::size_t step = 0; step < plan_.schedule().steps.size(); ++step) {
      bind(step, span_at(step));
      images.push_back(image());
    }
    return images;
  }

 private:
  std::vector<std::byte> image() const;

  const Plan& plan_;
  std::vector<KvBlock> kv_blocks_;
  std::vector<QueryProgram> programs_;
};

}  // namespace cpattn
