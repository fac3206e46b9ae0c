// The one function of CUDA's driver that this project calls by itself (src/device/cuda_driver.h).
// The doubles as a shared object have the driver's soname, and so are found under its name.
#include <cuda.h>

#include "tests/support/cuda/fake_memory.h"

using namespace cpattn::fake_cuda;

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  const std::optional<Allocation> allocation =
      find_allocation(reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address)));
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) =
          allocation->kind == MemoryKind::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(value) = 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = allocation->device;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
