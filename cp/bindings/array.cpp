#include "cp/bindings/array.h"

#include <pybind11/stl.h>

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

/// Strides of elements from those of bytes.
std::vector<std::int64_t> in_elements(std::vector<std::int64_t> strides, std::int64_t size,
                                      std::string_view name) {
  for (std::int64_t& stride : strides) {
    require(stride % size == 0, name, ": a stride of ", stride, " bytes, expected a multiple of ",
            size, ", the size of an element");
    stride /= size;
  }
  return strides;
}

/// Row-major without gaps.
std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
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
  array.strides = in_elements({info.strides.begin(), info.strides.end()},
                              static_cast<std::int64_t>(size_of_element(*element)), name);
  return array;
}

std::string device_text(int type, int index) {
  const std::string place = ":" + std::to_string(index);
  if (type == 2) return "cuda" + place;
  if (type == 8) return "metal" + place;
  if (type == 10) return "rocm" + place;
  return "of DLPack type " + std::to_string(type) + place;
}

using DlDeviceOf = std::pair<int, int>;  // type, index
constexpr int kDlCpu = 1, kDlCuda = 2, kDlPinned = 3, kDlManaged = 13;

/// What an attribute of the object gives, or InvalidArgument with the first line of what it raises.
template <class Body>
auto asked(std::string_view name, const Body& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    std::string text = py::str(error.value());
    throw InvalidArgument(detail::concat(name, ": ", text.substr(0, text.find('\n'))));
  } catch (const py::cast_error&) {
    throw InvalidArgument(detail::concat(
        name, ": what it says of its memory is not of the types of DLPack or of the CUDA array ",
        "interface"));
  }
}

DlDeviceOf dlpack_device(const py::handle& object, std::string_view name) {
  return asked(name, [&] { return object.attr("__dlpack_device__")().cast<DlDeviceOf>(); });
}

Array from_capsule(const py::handle& object, std::string_view name, const py::capsule& capsule) {
  require(std::string_view(capsule.name()) == "dltensor", name, ": a DLPack capsule named ",
          capsule.name(), ", expected dltensor");
  const DlTensor& tensor = capsule.get_pointer<DlManagedTensor>()->tensor;
  const std::optional<Element> element = element_of_type(tensor.type);
  require(element.has_value(), name, ": dtype ", dtype_text(object), ", ", kExpectedTypes);
  Array array{.name = std::string(name),
              .data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
              .element = *element,
              .shape = {tensor.shape, tensor.shape + tensor.num_dimensions},
              .strides = {},
              .is_read_only = false,
              .owner = capsule};
  if (tensor.strides == nullptr) {
    array.strides = dense_strides(array.shape);
  } else {
    array.strides.assign(tensor.strides, tensor.strides + tensor.num_dimensions);
  }
  return array;
}

Array from_dlpack(const py::handle& object, std::string_view name) {
  const auto [type, index] = dlpack_device(object, name);
  require(type == kDlCpu || type == kDlPinned, name, ": device ", device_text(type, index),
          ", expected cpu, where this group's shards are");
  return from_capsule(object, name,
                      asked(name, [&] { return object.attr("__dlpack__")().cast<py::capsule>(); }));
}

/// The interface's version 3; of version 2 that lacks the stream. It does not say which GPU.
Array from_cuda_interface(const py::handle& object, std::string_view name,
                          const CallStream& stream) {
  using Extents = std::vector<std::int64_t>;
  return asked(name, [&] {
    const auto entries = object.attr("__cuda_array_interface__").cast<py::dict>();
    const auto type = entries["typestr"].cast<std::string>();
    const std::optional<Element> element =
        type == "<f4" ? std::optional(Element::f32)
                      : (type == "<f2" ? std::optional(Element::f16) : std::nullopt);
    require(element.has_value(), name, ": typestr ", type, ", ", kExpectedTypes,
            " (the CUDA array interface has no bfloat16: use DLPack)");
    require(!entries.contains("mask") || entries["mask"].is_none(), name,
            ": has a mask, expected none");
    const auto [address, is_read_only] = entries["data"].cast<std::pair<std::uintptr_t, bool>>();
    Array array{.name = std::string(name),
                .data = reinterpret_cast<void*>(address),
                .element = *element,
                .shape = entries["shape"].cast<Extents>(),
                .strides = {},
                .is_read_only = is_read_only,
                .owner = py::reinterpret_borrow<py::object>(object)};
    const auto size = static_cast<std::int64_t>(size_of_element(*element));
    if (entries.contains("strides") && !entries["strides"].is_none()) {
      array.strides = in_elements(entries["strides"].cast<Extents>(), size, name);
    } else {
      array.strides = dense_strides(array.shape);
    }
    if (entries.contains("stream") && !entries["stream"].is_none())
      stream.wait_for(entries["stream"].cast<std::int64_t>(), name);
    return array;
  });
}

/// A torch tensor may stand for the negative of what its memory holds, which no protocol says.
void refuse_negated(const py::handle& object, std::string_view name) {
  const bool is_negated = py::hasattr(object, "is_neg") &&
                          asked(name, [&] { return object.attr("is_neg")().cast<bool>(); });
  require(!is_negated, name,
          ": a negated view of memory, expected memory of its own numbers; pass ", name,
          ".resolve_neg()");
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
  const bool has_dlpack = py::hasattr(object, "__dlpack__");
  refuse_negated(object, name);
  require(has_dlpack || !py::hasattr(object, "__cuda_array_interface__"), name,
          ": memory of a GPU, expected cpu, where this group's shards are");
  require(has_dlpack, name, ": a ", type_name(object),
          ", expected a numpy array, a torch tensor, or another object with the buffer protocol or "
          "DLPack");
  return from_dlpack(object, name);
}

Array gpu_array_from(const py::handle& object, std::string_view name, int ordinal,
                     const CallStream& stream) {
  const std::string place = device_text(kDlCuda, ordinal);
  require(PyObject_CheckBuffer(object.ptr()) == 0, name, ": host memory, expected memory of ",
          place);
  refuse_negated(object, name);
  if (py::hasattr(object, "__dlpack__")) {
    const auto [type, index] = dlpack_device(object, name);
    require(type == kDlManaged || (type == kDlCuda && index == ordinal), name, ": device ",
            type == kDlCpu || type == kDlPinned ? "cpu" : device_text(type, index), ", expected ",
            place);
    return from_capsule(
        object, name, asked(name, [&] {
          return object.attr("__dlpack__")(py::arg("stream") = stream.number()).cast<py::capsule>();
        }));
  }
  require(py::hasattr(object, "__cuda_array_interface__"), name, ": a ", type_name(object),
          ", expected a tensor in memory of ", place,
          ": an object with DLPack or __cuda_array_interface__");
  return from_cuda_interface(object, name, stream);
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

TensorView<float, 1> as_output_maxima(const Array& array) {
  require_writable(array);
  require_dimensions(array, 1, "one dimension: heads");
  require(array.element == Element::f32, array.name, ": dtype ", numpy_name(array.element),
          ", expected float32");
  return {.data = static_cast<float*>(array.data),
          .shape = {array.shape[0]},
          .strides = {last_stride(array)}};
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
