#include "kernels/cuda/rows.cuh"

#include "kernels/cuda/launch.h"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

/// Whether all rows of the copy are whole units at aligned addresses.
bool is_made_of(const RowCopy& copy, std::int64_t unit_bytes) {
  const auto is_multiple = [&](std::int64_t value) { return value % unit_bytes == 0; };
  return is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(copy.from))) &&
         is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(copy.to))) &&
         is_multiple(copy.from_stride_bytes) && is_multiple(copy.to_stride_bytes) &&
         is_multiple(copy.row_bytes);
}

}  // namespace

void copy_rows(const RowCopy& copy) {
  if (copy.num_rows == 0 || copy.row_bytes == 0) return;
  const auto kernel = is_made_of(copy, 16)  ? copy_kernel<uint4>
                      : is_made_of(copy, 4) ? copy_kernel<Bytes4>
                      : is_made_of(copy, 2) ? copy_kernel<Bytes2>
                                            : copy_kernel<std::byte>;
  const std::int64_t blocks = ceil_div(copy.num_rows, std::int64_t{kRowWarps});
  launch(kernel, dim3(narrow<unsigned>(blocks)), dim3(kRowThreads), 0,
         static_cast<cudaStream_t>(copy.stream.handle), copy);
}

void compute_delta(const DeltaArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0 || args.num_heads == 0) return;
  const std::int64_t blocks = ceil_div(args.num_rows, std::int64_t{kDeltaWarps * kDeltaRows});
  launch(delta_kernel, dim3(narrow<unsigned>(blocks), narrow<unsigned>(args.num_heads)),
         dim3(32 * kDeltaWarps), kDeltaSharedBytes, stream, args);
}

}  // namespace cpattn::cuda
