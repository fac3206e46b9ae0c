// GradientBinding: a step of the backward as the kernels take it, from the plans and the addresses
// of this rank's memory.
#pragma once

#include <cstddef>
#include <vector>

#include "cp/gradient_plan.h"
#include "cp/plan.h"
#include "kernels/block_gradient.h"

namespace cpattn {

/// Where the memory of one rank's backward is.
struct GradientMemoryBases {
  const std::byte* queries = nullptr;
  std::byte* carried_dkv = nullptr;
  std::byte* work_dkv = nullptr;
};

class GradientBinding {
 public:
  /// Room for the largest step: bind() allocates nothing.
  GradientBinding(const Plan& plan, const GradientPlan& gradient, const GradientMemoryBases& bases);

  /// `span`: the kv shard that is worked on; `message`: where the pieces go that leave.
  void bind(std::size_t step, const std::byte* span, std::byte* message);
  const std::vector<QueryBlock>& q_blocks() const { return q_blocks_; }
  const std::vector<KvBlock>& kv_blocks() const { return kv_blocks_; }
  const std::vector<GradientTask>& tasks() const { return tasks_; }
  const std::vector<std::byte*>& dkv_slots() const { return dkv_slots_; }

  /// The images of all steps, given where the span and the message of each will be; none for
  /// kernels without.
  template <class SpanAt, class MessageAt>
  std::vector<std::vector<std::byte>> make_images(const SpanAt& span_at,
                                                  const MessageAt& message_at) {
    std::vector<std::vector<std::byte>> images;
    if (plan_.kernels().gradient.step_image == nullptr) return images;
    for (std::size_t step = 0; step < gradient_.schedule().steps.size(); ++step) {
      bind(step, span_at(step), message_at(step));
      images.push_back(tasks_.empty() ? std::vector<std::byte>() : image());
    }
    return images;
  }

 private:
  std::byte* place(const DkvPlace& place, std::byte* message) const;
  std::vector<std::byte> image() const;

  const Plan& plan_;
  const GradientPlan& gradient_;
  GradientMemoryBases bases_;
  std::vector<QueryBlock> q_blocks_;
  std::vector<KvBlock> kv_blocks_;
  std::vector<GradientTask> tasks_;
  std::vector<std::byte*> dkv_slots_;
};

}  // namespace cpattn
