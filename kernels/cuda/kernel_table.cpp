#include "kernels/cuda/kernel_table.h"

#include "kernels/cuda/forward_f32.h"
#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/forward_sm80.h"
#include "kernels/cuda/pack_f32.h"
#include "kernels/cuda/pack_kv.h"
#include "kernels/f32_engine.h"

namespace cpattn::cuda {
namespace {

/// The forward of sm_80 and later, as the free functions a KernelTable holds: 16-bit elements on
/// tensor cores, f32 on the others.
struct Sm80 {
  static std::string_view numerics(DType dtype) {
    return dtype == DType::f32 ? kF32Numerics : "cuda-mma/tile64/ex2";
  }
  static std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
    return problem.dtype == DType::f32 ? f32::packed_kv_bytes(problem, num_keys)
                                       : cuda::packed_kv_bytes(problem, num_keys);
  }
  static void pack_kv(const PackKvArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::pack_kv(args) : cuda::pack_kv(args);
  }
  static std::size_t carried_slot_bytes(const KernelProblem& problem) {
    return state_slot_bytes(carried_shape(problem));
  }
  static std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
    return problem.dtype == DType::f32 ? f32::workspace_bytes(problem, limits)
                                       : sm80::workspace_bytes(problem, limits);
  }
  static void forward(const ForwardArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::forward(args) : sm80::forward(args);
  }
  static std::vector<std::byte> step_image(const ForwardArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::step_image(args) : sm80::step_image(args);
  }

  static constexpr KernelTable kTable{.name = "cuda/sm80",
                                      .device = DeviceKind::cuda,
                                      .numerics = numerics,
                                      .packed_kv_bytes = packed_kv_bytes,
                                      .pack_kv = pack_kv,
                                      .carried_slot_bytes = carried_slot_bytes,
                                      .workspace_bytes = workspace_bytes,
                                      .forward = forward,
                                      .step_image = step_image,
                                      .gradient = {}};
};

}  // namespace

const KernelTable& sm80_kernels() { return Sm80::kTable; }

}  // namespace cpattn::cuda
