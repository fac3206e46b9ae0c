#include "kernels/cuda/backward_sm90.h"
#include "kernels/cuda/burn.h"
#include "kernels/cuda/forward_sm90.h"
#include "kernels/cuda/kernel_table.h"

namespace cpattn::cuda {
namespace {

/// The portable table with another forward and backward for 16-bit elements. Packed forms, slots
/// and carried slots are the same.
struct Sm90 {
  static bool is_portable(DType dtype) { return dtype == DType::f32; }
  static bool has_portable_gradient(const KernelProblem& problem) {
    return is_portable(problem.dtype) || !sm90_gradient::takes(problem.shape);
  }

  static std::string_view numerics(DType dtype) {
    return is_portable(dtype) ? sm80_kernels().numerics(dtype)
                              : "cuda-wgmma/step128-64,gradient64/ex2";
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

  static LaunchTiles launch_tiles(const KernelProblem& problem) {
    return is_portable(problem.dtype) ? sm80_kernels().launch_tiles(problem)
                                      : sm90::launch_tiles(problem.shape);
  }

  static void backward(const BackwardArgs& args) {
    return has_portable_gradient(args.problem) ? sm80_kernels().gradient.backward(args)
                                               : sm90_gradient::backward(args);
  }
  static std::vector<std::byte> gradient_image(const BackwardArgs& args) {
    return has_portable_gradient(args.problem) ? sm80_kernels().gradient.step_image(args)
                                               : sm90_gradient::step_image(args);
  }
  static std::vector<LaunchTiles> gradient_tiles(const KernelProblem& problem) {
    return has_portable_gradient(problem) ? sm80_kernels().gradient.launch_tiles(problem)
                                          : sm90_gradient::launch_tiles(problem.shape);
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
    table.launch_tiles = launch_tiles;
    table.burn = burn;
    table.gradient.backward = backward;
    table.gradient.step_image = gradient_image;
    table.gradient.launch_tiles = gradient_tiles;
    return table;
  }
};

}  // namespace

const KernelTable& sm90_kernels() {
  static const KernelTable table = Sm90::table();
  return table;
}

}  // namespace cpattn::cuda
