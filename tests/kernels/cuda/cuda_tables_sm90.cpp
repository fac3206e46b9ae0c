// Has the shared kernel tests of this program run on Hopper's kernels, executed by the host layer.
#include "kernels/cuda/host/executor.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/support/tested_tables.h"

namespace cpattn::testing {
namespace {

const bool is_set = [] {
  static cuda_host::Executor executor;
  tested() = {
      {&cuda::sm90_kernels()}, {DType::f16, DType::bf16}, {static_cast<cudaStream_t>(&executor)}};
  return true;
}();

}  // namespace
}  // namespace cpattn::testing
