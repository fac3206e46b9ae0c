// The C face of GPUs, and of the largest logits.
#include "cp/bindings/c_convert.h"
#include "cp/bindings/c_handles.h"
#include "src/comm/max_over_ranks.h"

using namespace cpattn;  // NOLINT: this file is the border

cpattn_status cpattn_group_on_cuda(cpattn_group* group, const cpattn_cuda_options* options,
                                   cpattn_group** cuda_group) {
  return c::guarded([&] {
    const auto object = c::object_of(group);
    const GpuOptions known = c::made_or_refused(
        [&] {
          require(cuda_group != nullptr, "cuda_group: NULL, expected the address of a handle");
          return c::gpu_options_of(options);
        },
        [&](const char* why) { GpuGroup::refuse(*object->ranks, why); });
    c::give(cuda_group,
            std::make_shared<c::Group>(object->ranks, GpuGroup::make(object->ranks, known)));
  });
}

cpattn_status cpattn_plan_prepare_backward(cpattn_plan* plan) {
  return c::guarded([&] { c::object_of(plan)->prepare_backward(); });
}

cpattn_status cpattn_reset_head_maxima(cpattn_plan* plan, float* head_maxima, void* stream) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    const std::int64_t num_heads = object->plan().problem().shape.num_heads;
    object->reset_head_maxima({head_maxima, {num_heads}, {1}}, {stream});
  });
}

cpattn_status cpattn_max_over_ranks(cpattn_group* group, float* values, size_t num_values,
                                    void* stream, double timeout_seconds) {
  return c::guarded([&] {
    const auto object = c::object_of(group);
    if (!c::is_timeout(timeout_seconds)) {
      refuse_max_over_ranks(*object->ranks,
                            detail::concat("timeout_seconds is ", timeout_seconds,
                                           ", expected 0.001 to ", c::kLongestTimeout),
                            deadline_after(Seconds(CpConfig().timeout_seconds)));
    }
    max_over_ranks(*object->shards(), {values, num_values}, {stream},
                   deadline_after(Seconds(timeout_seconds)));
  });
}
