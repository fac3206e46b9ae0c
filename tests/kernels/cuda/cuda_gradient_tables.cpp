// Has the shared tests of gradients run on the CUDA backend, executed by the host layer.
#include "kernels/cuda/host/executor.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/support/tested_tables.h"

namespace cpattn::testing {
namespace {

/// As little shared memory as any of the architectures has.
constexpr std::size_t kLeastSharedBytes = 99 * 1024;

const bool is_set = [] {
  static cuda_host::Executor executor({.max_shared_bytes = kLeastSharedBytes});
  tested() = {{&cuda::sm80_kernels()},
              {DType::f32, DType::f16, DType::bf16},
              {static_cast<cudaStream_t>(&executor)}};
  return true;
}();

}  // namespace
}  // namespace cpattn::testing
