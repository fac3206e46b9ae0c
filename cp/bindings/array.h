// Array: memory of a numpy array, a torch tensor or anything with the buffer protocol, DLPack or
// the CUDA array interface, looked at without a copy.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cp/bindings/call_stream.h"
#include "src/base/tensor_view.h"

namespace cpattn::python {

namespace py = pybind11;

/// Element types Python hands us: those of the kernels and f64, which only the reference takes.
enum class Element { f32, f16, bf16, f64 };

struct Array {
  std::string name;  ///< of the argument, for messages
  void* data = nullptr;
  Element element = Element::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in elements
  bool is_read_only = false;
  py::object owner;  ///< keeps the memory while the view lives
};

/// InvalidArgument, naming the argument, for anything that is not a CPU array of a known type.
Array array_from(const py::handle& object, std::string_view name);

/// The same of an array in the memory of GPU `ordinal`, whose producer's work the stream then waits
/// for: by DLPack, whose producer sees to that itself, or by the CUDA array interface.
Array gpu_array_from(const py::handle& object, std::string_view name, int ordinal,
                     const CallStream& stream);

/// The views the library takes; InvalidArgument for another number of dimensions, f64, or (when
/// the view is writable) read-only memory. Shapes are the library's to judge.
AnyConstTensor as_tensor(const Array& array);
AnyTensor as_output_tensor(const Array& array);
TensorView<const float, 2> as_lse(const Array& array);
TensorView<float, 2> as_output_lse(const Array& array);
TensorView<float, 1> as_output_maxima(const Array& array);

/// "float32", "f32", numpy.float32, torch.bfloat16, ... -> the element type.
Element element_named(const py::handle& dtype, std::string_view name);
std::string_view numpy_name(Element element);
DType dtype_of(Element element, std::string_view name);

}  // namespace cpattn::python
