#include "kernels/cuda/kernel_table.h"

#include "kernels/cuda/backward_f32.h"
#include "kernels/cuda/backward_sm80.h"
#include "kernels/cuda/burn.h"
#include "kernels/cuda/forward_f32.h"
#include "kernels/cuda/forward_params.h"
#include "kernels/cuda/forward_sm80.h"
#include "kernels/cuda/gradient_slots.h"
#include "kernels/cuda/pack_f32.h"
#include "kernels/cuda/pack_kv.h"
#include "kernels/cuda/pack_queries.h"
#include "kernels/cuda/pack_queries_f32.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/sum_dkv.h"
#include "kernels/f32_engine.h"

namespace cpattn::cuda {
namespace {

/// The kernels of sm_80 and later, as the free functions a KernelTable holds: 16-bit elements on
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

  static LaunchTiles launch_tiles(const KernelProblem& problem) {
    return problem.dtype == DType::f32 ? f32::launch_tiles(problem.shape)
                                       : sm80::launch_tiles(problem.shape);
  }

  static std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows) {
    return problem.dtype == DType::f32 ? f32::packed_query_bytes(problem, num_rows)
                                       : cuda::packed_query_bytes(problem, num_rows);
  }
  static void pack_queries(const PackQueriesArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::pack_queries(args) : cuda::pack_queries(args);
  }
  static std::size_t gradient_workspace_bytes(const KernelProblem& problem,
                                              const GradientLimits& limits) {
    return problem.dtype == DType::f32 ? f32::gradient_workspace_bytes(problem, limits)
                                       : sm80_gradient::workspace_bytes(problem, limits);
  }
  static void backward(const BackwardArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::backward(args) : sm80_gradient::backward(args);
  }
  static std::vector<std::byte> gradient_image(const BackwardArgs& args) {
    return args.problem.dtype == DType::f32 ? f32::gradient_image(args)
                                            : sm80_gradient::step_image(args);
  }
  static std::vector<LaunchTiles> gradient_tiles(const KernelProblem& problem) {
    return problem.dtype == DType::f32 ? f32::gradient_tiles(problem.shape)
                                       : sm80_gradient::launch_tiles(problem.shape);
  }

  static constexpr GradientKernels kGradient{.packed_kv_bytes = packed_kv_bytes,
                                             .pack_kv = pack_kv,
                                             .packed_query_bytes = packed_query_bytes,
                                             .pack_queries = pack_queries,
                                             .dq_slot_bytes = cuda::dq_slot_bytes,
                                             .dkv_slot_bytes = cuda::dkv_slot_bytes,
                                             .workspace_bytes = gradient_workspace_bytes,
                                             .backward = backward,
                                             .sum_dkv = cuda::sum_dkv,
                                             .zero_rows = cuda::zero_rows,
                                             .step_image = gradient_image,
                                             .launch_tiles = gradient_tiles};

  static constexpr KernelTable kTable{.name = "cuda/sm80",
                                      .device = DeviceKind::cuda,
                                      .numerics = numerics,
                                      .packed_kv_bytes = packed_kv_bytes,
                                      .pack_kv = pack_kv,
                                      .carried_slot_bytes = carried_slot_bytes,
                                      .workspace_bytes = workspace_bytes,
                                      .forward = forward,
                                      .step_image = step_image,
                                      .launch_tiles = launch_tiles,
                                      .copy_rows = cuda::copy_rows,
                                      .burn = cuda::burn,
                                      .gradient = kGradient};
};

}  // namespace

const KernelTable& sm80_kernels() { return Sm80::kTable; }

}  // namespace cpattn::cuda
