#include "kernels/cuda/kernel_table.h"

#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/forward_sm80.h"
#include "kernels/cuda/pack_kv.h"
#include "src/base/error.h"

namespace cpattn::cuda {
namespace {

/// The 16-bit kernels compute on tensor cores.
void check_dtype(DType dtype) {
  require<Unsupported>(dtype != DType::f32, "f32: kernels/cuda has f16 and bf16");
}

/// The forward of sm_80 and later, as the free functions a KernelTable holds.
struct Sm80 {
  static std::string_view numerics(DType dtype) {
    check_dtype(dtype);
    return "cuda-mma/tile64/ex2";
  }
  static std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
    check_dtype(problem.dtype);
    return cuda::packed_kv_bytes(problem, num_keys);
  }
  static void pack_kv(const PackKvArgs& args) {
    check_dtype(args.problem.dtype);
    cuda::pack_kv(args);
  }
  static std::size_t carried_slot_bytes(const KernelProblem& problem) {
    return state_slot_bytes(carried_shape(problem));
  }
  static std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
    check_dtype(problem.dtype);
    return sm80::workspace_bytes(problem, limits);
  }
  static void forward(const ForwardArgs& args) {
    check_dtype(args.problem.dtype);
    sm80::forward(args);
  }
  static std::vector<std::byte> step_image(const ForwardArgs& args) {
    check_dtype(args.problem.dtype);
    return sm80::step_image(args);
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
