#include "cp/bindings/array.h"

#include <algorithm>
#include <array>
#include <optional>

#include "cp/bindings/dlpack_abi.h"
#include "src/base/error.h"

namespace cpattn::python {
namespace {

constexpr std::string_view kExpectedTypes = "expected float32, float16 or bfloat16";

std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__"));
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
  return text + "]";
}

std::optional<Element> element_of_format(const std::string& format) {
  const std::size_t start = format.find_first_not_of("<=@");
  const std::string code = start == std::string::npos ? "" : format.substr(start);
  if (code == "f") return Element::f32;
  if (code == "e") return Element::f16;
  if (code == "d") return Element::f64;
  return std::nullopt;
}

std::optional<Element> element_of_type(const DlType& type) {
  if (type.lanes != 1) return std::nullopt;
  if (type.code == 2 && type.bits == 32) return Element::f32;
  if (type.code == 2 && type.bits == 16) return Element::f16;
  if (type.code == 2 && type.bits == 64) return Element::f64;
  if (type.code == 4 && type.bits == 16) return Element::bf16;
  return std::nullopt;
}

std::size_t size_of_element(Element element) {
  switch (element) {
    case Element::f32:
      return 4;
    case Element::f16:
    case Element::bf16:
      return 2;
    case Element::f64:
      return 8;
  }
  return 0;
}

/// What the object calls its type, for messages: "int64", "torch.float8_e4m3fn", ...
std::string dtype_text(const py::handle& object) {
  return py::hasattr(object, "dtype") ? std::string(py::str(object.attr("dtype"))) : "unknown type";
}

Array from_buffer(const py::handle& object, std::string_view name, std::optional<Element> known) {
  const py::buffer_info info = py::reinterpret_borrow<py::buffer>(object).request();
  const std::optional<Element> element = known ? known : element_of_format(info.format);
  require(element.has_value(), name, ": dtype ", dtype_text(object), ", ", kExpectedTypes);
  Array array{.name = std::string(name),
              .data = info.ptr,
              .element = *element,
              .shape = {info.shape.begin(), info.shape.end()},
              .strides = {},
              .is_read_only = info.readonly,
              .owner = py::reinterpret_borrow<py::object>(object)};
  const auto size = static_cast<py::ssize_t>(size_of_element(*element));
  for (const py::ssize_t stride : info.strides) {
    require(stride % size == 0, name, ": a stride of ", stride, " bytes, expected a multiple of ",
            size, ", the size of an element");
    array.strides.push_back(stride / size);
  }
  return array;
}

std::string device_text(int type, int index) {
  const std::string place = ":" + std::to_string(index);
  if (type == 2) return "cuda" + place;
  if (type == 8) return "metal" + place;
  if (type == 10) return "rocm" + place;
  return "of DLPack type " + std::to_string(type) + place;
}

void require_cpu(const py::handle& object, std::string_view name) {
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  constexpr int kCpu = 1, kPinned = 3;
  require(device.first == kCpu || device.first == kPinned, name, ": device ",
          device_text(device.first, device.second),
          ", expected cpu: this build computes on CPU; pass a copy on the CPU");
}

Array from_dlpack(const py::handle& object, std::string_view name) {
  py::capsule capsule;
  try {
    require_cpu(object, name);
    capsule = object.attr("__dlpack__")().cast<py::capsule>();
  } catch (py::error_already_set& error) {
    std::string text = py::str(error.value());
    throw InvalidArgument(detail::concat(name, ": ", text.substr(0, text.find('\n'))));
  }
  require(std::string_view(capsule.name()) == "dltensor", name, ": a DLPack capsule named ",
          capsule.name(), ", expected dltensor");
  const DlTensor& tensor = capsule.get_pointer<DlManagedTensor>()->tensor;
  const std::optional<Element> element = element_of_type(tensor.type);
  require(element.has_value(), name, ": dtype ", dtype_text(object), ", ", kExpectedTypes);
  Array array{.name = std::string(name),
              .data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
              .element = *element,
              .shape = {tensor.shape, tensor.shape + tensor.num_dimensions},
              .strides = std::vector<std::int64_t>(static_cast<std::size_t>(tensor.num_dimensions)),
              .is_read_only = false,
              .owner = capsule};
  std::int64_t step = 1;
  for (std::size_t i = array.shape.size(); i-- > 0;) {
    array.strides[i] = tensor.strides == nullptr ? step : tensor.strides[i];
    step *= array.shape[i];
  }
  return array;
}

void require_dimensions(const Array& array, std::size_t count, std::string_view meaning) {
  require(array.shape.size() == count, array.name, ": shape ", shape_text(array.shape),
          ", expected ", meaning);
}

void require_writable(const Array& array) {
  require(!array.is_read_only, array.name, ": read-only memory, expected an array to write to");
}

/// A stride that leads nowhere, of a last dimension of extent 1 or of an array without elements,
/// may be anything; the library wants 1.
std::int64_t last_stride(const Array& array) {
  const bool is_empty = std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end();
  return is_empty || array.shape.back() == 1 ? 1 : array.strides.back();
}

}  // namespace

Array array_from(const py::handle& object, std::string_view name) {
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    // numpy cannot describe bfloat16 in a buffer; the bits are the same under another name.
    if (py::hasattr(object, "dtype") && dtype_text(object) == "bfloat16")
      return from_buffer(object.attr("view")("uint16"), name, Element::bf16);
    return from_buffer(object, name, std::nullopt);
  }
  require(py::hasattr(object, "__dlpack__"), name, ": a ", type_name(object),
          ", expected a numpy array, a torch tensor, or another object with the buffer protocol or "
          "DLPack");
  return from_dlpack(object, name);
}

AnyConstTensor as_tensor(const Array& array) {
  require_dimensions(array, 3, "three dimensions: tokens, heads, channels");
  return {.data = array.data,
          .dtype = dtype_of(array.element, array.name),
          .shape = {array.shape[0], array.shape[1], array.shape[2]},
          .strides = {array.strides[0], array.strides[1], last_stride(array)}};
}

AnyTensor as_output_tensor(const Array& array) {
  require_writable(array);
  const AnyConstTensor view = as_tensor(array);
  return {.data = array.data, .dtype = view.dtype, .shape = view.shape, .strides = view.strides};
}

TensorView<const float, 2> as_lse(const Array& array) {
  require_dimensions(array, 2, "two dimensions: tokens, heads");
  require(array.element == Element::f32, array.name, ": dtype ", numpy_name(array.element),
          ", expected float32");
  return {.data = static_cast<const float*>(array.data),
          .shape = {array.shape[0], array.shape[1]},
          .strides = {array.strides[0], array.strides[1]}};
}

TensorView<float, 2> as_output_lse(const Array& array) {
  require_writable(array);
  const TensorView<const float, 2> view = as_lse(array);
  return {.data = static_cast<float*>(array.data), .shape = view.shape, .strides = view.strides};
}

std::string_view numpy_name(Element element) {
  switch (element) {
    case Element::f32:
      return "float32";
    case Element::f16:
      return "float16";
    case Element::bf16:
      return "bfloat16";
    case Element::f64:
      return "float64";
  }
  return "?";
}

Element element_named(const py::handle& dtype, std::string_view name) {
  // A numpy scalar type calls itself "<class 'numpy.float32'>".
  std::string text =
      py::isinstance<py::type>(dtype) ? py::str(dtype.attr("__name__")) : py::str(dtype);
  text = text.substr(text.rfind('.') + 1);
  for (const Element element : {Element::f32, Element::f16, Element::bf16, Element::f64}) {
    if (text == numpy_name(element)) return element;
  }
  if (text == "f32") return Element::f32;
  if (text == "f16") return Element::f16;
  if (text == "bf16") return Element::bf16;
  throw InvalidArgument(detail::concat(name, ": ", text, ", ", kExpectedTypes));
}

DType dtype_of(Element element, std::string_view name) {
  switch (element) {
    case Element::f32:
      return DType::f32;
    case Element::f16:
      return DType::f16;
    case Element::bf16:
      return DType::bf16;
    case Element::f64:
      break;
  }
  throw InvalidArgument(detail::concat(name, ": dtype float64, ", kExpectedTypes));
}

}  // namespace cpattn::python
