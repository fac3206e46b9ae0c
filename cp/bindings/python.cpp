// The extension module cpattn._cpattn: what Python's half of the package is built on.
#include <pybind11/pybind11.h>

#include <exception>
#include <new>

#include "cp/bindings/attention.h"
#include "cp/bindings/group.h"
#include "cp/bindings/reference.h"
#include "cp/bindings/tools.h"
#include "src/base/error.h"

namespace cpattn::python {
namespace {

/// cpattn.<name>, deriving from cpattn.Error and the builtin exception of the same cause.
py::object make_exception(py::module_& module, const char* name, const char* text,
                          const py::handle& base, const py::handle& builtin) {
  const py::tuple bases = py::make_tuple(base, builtin);
  const std::string full_name = std::string("cpattn.") + name;
  py::object type = py::reinterpret_steal<py::object>(
      PyErr_NewExceptionWithDoc(full_name.c_str(), text, bases.ptr(), nullptr));
  if (!type) throw py::error_already_set();
  module.attr(name) = type;
  return type;
}

/// The module keeps these alive.
struct ExceptionTypes {
  PyObject* invalid_argument = nullptr;
  PyObject* unsupported = nullptr;
  PyObject* comm = nullptr;
  PyObject* device = nullptr;
  PyObject* internal = nullptr;
  bool has_comm_failed = false;  ///< a CommError was raised: peers may be gone
};

ExceptionTypes& exception_types() {
  static ExceptionTypes types;
  return types;
}

void translate(std::exception_ptr failure) {
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const InvalidArgument& error) {
    PyErr_SetString(exception_types().invalid_argument, error.what());
  } catch (const Unsupported& error) {
    PyErr_SetString(exception_types().unsupported, error.what());
  } catch (const CommError& error) {
    exception_types().has_comm_failed = true;
    PyErr_SetString(exception_types().comm, error.what());
  } catch (const DeviceError& error) {
    PyErr_SetString(exception_types().device, error.what());
  } catch (const InternalError& error) {
    PyErr_SetString(exception_types().internal, error.what());
  } catch (const py::error_already_set&) {  // Python's own; from here on pybind11 knows better
    throw;
  } catch (const py::builtin_exception&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    PyErr_SetString(exception_types().internal, error.what());
  }
}

void bind_errors(py::module_& module) {
  const py::object base = py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(
      "cpattn.Error", "What cpattn raises derives from this.", PyExc_Exception, nullptr));
  module.attr("Error") = base;
  ExceptionTypes& types = exception_types();
  types.invalid_argument =
      make_exception(module, "InvalidArgumentError",
                     "The caller passed something wrong: an argument, its value, what was "
                     "expected. Nothing was exchanged; everything can be used again.",
                     base, PyExc_ValueError)
          .ptr();
  types.unsupported =
      make_exception(module, "UnsupportedError",
                     "A part that was not compiled in, or that this machine does not have.", base,
                     PyExc_NotImplementedError)
          .ptr();
  types.comm =
      make_exception(module, "CommError",
                     "A peer or the network failed, or a deadline passed: the group must not be "
                     "used again.",
                     base, PyExc_RuntimeError)
          .ptr();
  types.device =
      make_exception(module, "DeviceError", "A call of CUDA failed: a GPU or its driver.", base,
                     PyExc_RuntimeError)
          .ptr();
  types.internal =
      make_exception(module, "InternalError", "A bug of cpattn.", base, PyExc_RuntimeError).ptr();
  py::register_exception_translator(&translate);
  module.def("has_comm_failed", [] { return exception_types().has_comm_failed; });
}

}  // namespace
}  // namespace cpattn::python

PYBIND11_MODULE(_cpattn, module) {
  using namespace cpattn::python;
  module.doc() = "The compiled half of cpattn.";
  module.attr("__version__") = CP_VERSION;
  bind_errors(module);
  bind_group(module);
  bind_attention(module);
  bind_reference(module);
  bind_tools(module);
}
