// Device memory out of two Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include "cp/cuda_backend.h"

namespace cpattn::python {

namespace py = pybind11;

/// `given`: None, for cudaMalloc; or a pair of callables, allocate(size, stream) -> address and
/// free(address). Called with the GIL, from whatever thread needs or gives back memory; what they
/// raise goes to sys.unraisablehook, and means that there is no memory. InvalidArgument for
/// anything else.
CudaAllocator allocator_from(const py::object& given);

}  // namespace cpattn::python
