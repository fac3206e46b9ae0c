// Descriptions of tensors for TMA, made on the host before a kernel starts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/ptx_sm90.h"

namespace cpattn::cuda {

/// A tensor of up to four dimensions, innermost first, and the box that one load brings.
struct TiledTensor {
  const void* data = nullptr;  ///< 16-byte aligned
  std::int64_t element_bytes = 2;
  int rank = 2;  ///< 2 to 4
  std::int64_t shape[4] = {1, 1, 1, 1};
  std::int64_t strides_bytes[4] = {};  ///< of dimensions 1 and up: multiples of 16; [0] is not read
  std::int64_t box[4] = {1, 1, 1, 1};  ///< at most 256 each
  Swizzle swizzle = Swizzle::none;     ///< else box[0] is exactly as wide as its rows
};

/// InvalidArgument names what the hardware does not take.
TensorMap make_tensor_map(const TiledTensor& tensor);

}  // namespace cpattn::cuda
