#include "kernels/cuda/tensor_map.h"

#include <cstring>

#include "src/base/error.h"

namespace cpattn::cuda {
namespace {

void check(const TiledTensor& tensor) {
  require(tensor.rank >= 2 && tensor.rank <= 4, "tensor map: ", tensor.rank,
          " dimensions; expected 2 to 4");
  require(tensor.element_bytes == 2 || tensor.element_bytes == 4, "tensor map: elements of ",
          tensor.element_bytes, " bytes; expected 2 or 4");
  require(reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && tensor.data != nullptr,
          "tensor map: the address must be a multiple of 16");
  for (int d = 0; d < tensor.rank; ++d) {
    require(tensor.shape[d] >= 1 && tensor.shape[d] <= INT64_C(1) << 32, "tensor map: shape[", d,
            "] is ", tensor.shape[d], "; expected 1 to 2^32");
    require(tensor.box[d] >= 1 && tensor.box[d] <= 256, "tensor map: box[", d, "] is ",
            tensor.box[d], "; expected 1 to 256");
    require(d == 0 || (tensor.strides_bytes[d] > 0 && tensor.strides_bytes[d] % 16 == 0 &&
                       tensor.strides_bytes[d] < INT64_C(1) << 40),
            "tensor map: stride ", d, " is ", tensor.strides_bytes[d],
            " bytes; expected a positive multiple of 16 below 2^40");
  }
  const std::int64_t width = tensor.box[0] * tensor.element_bytes;
  require(width % 16 == 0, "tensor map: rows of ", width, " bytes; expected a multiple of 16");
  require(tensor.swizzle == Swizzle::none || width == width_bytes(tensor.swizzle),
          "tensor map: rows of ", width, " bytes; this swizzle permutes rows of ",
          width_bytes(tensor.swizzle));
}

}  // namespace

#if defined(__CUDACC__)

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// From the driver that is there: linking it would make a machine without one refuse the program.
Encode encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &result);
  require<Unsupported>(status == cudaSuccess && result == cudaDriverEntryPointSuccess,
                       "this driver has no cuTensorMapEncodeTiled; 12.0 or later has");
  return reinterpret_cast<Encode>(function);
}

CUtensorMapSwizzle driver_name(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::none:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
    case Swizzle::bytes32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case Swizzle::bytes64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::bytes128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

TensorMap make_tensor_map(const TiledTensor& tensor) {
  check(tensor);
  cuuint64_t shape[4], strides[4];
  cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
  for (int d = 0; d < tensor.rank; ++d) {
    shape[d] = static_cast<cuuint64_t>(tensor.shape[d]);
    box[d] = static_cast<cuuint32_t>(tensor.box[d]);
    if (d > 0) strides[d - 1] = static_cast<cuuint64_t>(tensor.strides_bytes[d]);
  }
  TensorMap map;
  const CUresult status = encode_function()(
      &map,
      tensor.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32,
      static_cast<cuuint32_t>(tensor.rank), const_cast<void*>(tensor.data), shape, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, driver_name(tensor.swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require<InternalError>(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error ",
                         static_cast<int>(status));
  return map;
}

#else

TensorMap make_tensor_map(const TiledTensor& tensor) {
  check(tensor);
  TensorMap map;
  map.base = static_cast<const std::byte*>(tensor.data);
  map.rank = static_cast<std::uint8_t>(tensor.rank);
  map.element_bytes = static_cast<std::uint8_t>(tensor.element_bytes);
  map.swizzle = tensor.swizzle;
  for (int d = 0; d < tensor.rank; ++d) {
    map.shape[d] = tensor.shape[d];
    map.box[d] = static_cast<std::uint16_t>(tensor.box[d]);
    map.strides_bytes[d] = d == 0 ? tensor.element_bytes : tensor.strides_bytes[d];
  }
  return map;
}

#endif

}  // namespace cpattn::cuda
