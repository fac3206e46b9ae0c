#include "kernels/cuda/backward_params.h"

#include "kernels/lse.h"

namespace cpattn::cuda {

BackwardParams backward_params(const BackwardArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  return {.image = reinterpret_cast<const GradientImage*>(args.image),
          .num_heads = narrow<int>(shape.num_heads),
          .num_kv_heads = narrow<int>(shape.num_kv_heads),
          .qk_panels = num_panels(shape.head_dim),
          .v_panels = num_panels(shape.value_dim),
          .slot_form = gradient_slot_form(shape),
          .scale_log2 = static_cast<float>(shape.softmax_scale * kLog2e),
          .scale = static_cast<float>(shape.softmax_scale),
          .dq_slots = args.dq_slots,
          .dq_slot_bytes = static_cast<std::int64_t>(dq_slot_bytes(args.problem)),
          .dq_slot_rows = args.problem.max_chunk_rows,
          .dq = args.dq.data,
          .dq_dtype = args.dq.dtype,
          .dq_row_stride = args.dq.strides[0],
          .dq_head_stride = args.dq.strides[1]};
}

}  // namespace cpattn::cuda
