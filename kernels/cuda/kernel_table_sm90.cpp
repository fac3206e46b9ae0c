#include "kernels/cuda/burn.h"
#include "kernels/cuda/forward_sm90.h"
#include "kernels/cuda/kernel_table.h"

namespace cpattn::cuda {
namespace {

/// The portable table with another forward for 16-bit elements. Packed forms and carried slots are
/// the same.
struct Sm90 {
  static bool is_portable(DType dtype) { return dtype == DType::f32; }

  static std::string_view numerics(DType dtype) {
    return is_portable(dtype) ? sm80_kernels().numerics(dtype) : "cuda-wgmma/step128-64/ex2";
  }
  static std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
    return is_portable(problem.dtype) ? sm80_kernels().workspace_bytes(problem, limits)
                                      : sm90::workspace_bytes(problem, limits);
  }
  static void forward(const ForwardArgs& args) {
    return is_portable(args.problem.dtype) ? sm80_kernels().forward(args) : sm90::forward(args);
  }
  static std::vector<std::byte> step_image(const ForwardArgs& args) {
    return is_portable(args.problem.dtype) ? sm80_kernels().step_image(args)
                                           : sm90::step_image(args);
  }

  static double burn(const BurnArgs& args) {
    return is_portable(args.dtype) ? sm80_kernels().burn(args) : sm90::burn(args);
  }

  static KernelTable table() {
    KernelTable table = sm80_kernels();
    table.name = "cuda/sm90";
    table.numerics = numerics;
    table.workspace_bytes = workspace_bytes;
    table.forward = forward;
    table.step_image = step_image;
    table.burn = burn;
    return table;
  }
};

}  // namespace

const KernelTable& sm90_kernels() {
  static const KernelTable table = Sm90::table();
  return table;
}

}  // namespace cpattn::cuda
