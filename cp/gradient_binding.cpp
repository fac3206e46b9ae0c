#include "cp/gradient_binding.h"

namespace cpattn {

GradientBinding::GradientBinding(const Plan& plan, const GradientPlan& gradient,
                                 const GradientMemoryBases& bases)
    : plan_(plan), gradient_(gradient), bases_(bases) {
  const std::vector<OwnedChunk>& own = plan.shard().q;
  for (std::size_t i = 0; i < own.size(); ++i) {
    q_blocks_.push_back(
        {bases.queries + gradient.query_offsets()[i], own[i].local_begin, own[i].num_tokens});
  }
  kv_blocks_.reserve(static_cast<std::size_t>(gradient.limits().kv_blocks));
  for (const GradientStep& step : gradient.schedule().steps) {
    tasks_.reserve(static_cast<std::size_t>(step.task_end - step.task_begin));
    dkv_slots_.reserve(static_cast<std::size_t>(step.num_places));
  }
}

void GradientBinding::bind(std::size_t step, const std::byte* span, std::byte* message) {
  const GradientSchedule& schedule = gradient_.schedule();
  const GradientStep& now = schedule.steps[step];
  gradient_.ring().bind(now.kv_owner, step, span, kv_blocks_);
  dkv_slots_.clear();
  for (const DkvPlace& there : gradient_.places(step)) dkv_slots_.push_back(place(there, message));
  tasks_.clear();
  for (std::int64_t i = now.task_begin; i < now.task_end; ++i) {
    const ScheduledTask& item = schedule.tasks[static_cast<std::size_t>(i)];
    const SumOp* sums = schedule.sums.data();
    GradientTask& task = tasks_.emplace_back(item.task);
    task.dq_sums = {sums + item.dq_sum_begin, sums + item.dq_sum_end};
    task.dkv_sums = {sums + item.dkv_sum_begin, sums + item.dkv_sum_end};
  }
}

std::byte* GradientBinding::place(const DkvPlace& place, std::byte* message) const {
  switch (place.area) {
    case DkvArea::carried:
      return bases_.carried_dkv + place.offset;
    case DkvArea::work:
      return bases_.work_dkv + place.offset;
    case DkvArea::message:
      return message + place.offset;
  }
  return nullptr;
}

std::vector<std::byte> GradientBinding::image() const {
  BackwardArgs args;
  args.problem = plan_.kernel_problem();
  args.q_blocks = q_blocks_;
  args.kv_blocks = kv_blocks_;
  args.tasks = tasks_;
  args.dkv_slots = dkv_slots_;
  args.limits = gradient_.limits();
  return plan_.kernels().gradient.step_image(args);
}

}  // namespace cpattn
