#include "cp/step_binding.h"

namespace cpattn {

StepBinding::StepBinding(const Plan& plan) : plan_(plan) {
  kv_blocks_.reserve(static_cast<std::size_t>(plan.limits().blocks));
  programs_.reserve(plan.shard().q.size());
}

void StepBinding::bind(std::size_t step, const std::byte* span) {
  const Step& now = plan_.schedule().steps[step];
  plan_.ring().bind(now.kv_owner, step, span, kv_blocks_);
  programs_.clear();
  const std::span<const StateOp> ops(plan_.schedule().ops);
  for (const ChunkProgram& program : now.programs) {
    const OwnedChunk& q = plan_.shard().q[static_cast<std::size_t>(program.q_chunk)];
    programs_.push_back({q.local_begin, q.num_tokens,
                         ops.subspan(static_cast<std::size_t>(program.op_begin),
                                     static_cast<std::size_t>(program.op_end - program.op_begin))});
  }
}

std::vector<std::byte> StepBinding::image() const {
  ForwardArgs args;
  args.problem = plan_.kernel_problem();
  args.kv_blocks = kv_blocks_;
  args.programs = programs_;
  args.limits = plan_.limits();
  return plan_.kernels().step_image(args);
}

}  // namespace cpattn
