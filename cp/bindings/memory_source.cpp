#include "cp/bindings/memory_source.h"

#include <cstdint>
#include <memory>
#include <string>

#include "src/base/error.h"

namespace cpattn::python {
namespace {

struct Functions {
  py::object allocate, free;
};

/// The last memory may be given back by a thread that does not hold the GIL, or after Python.
void forget(Functions* functions) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire acquire;
  delete functions;
}

void* allocate(void* context, std::size_t size_bytes, Stream stream) {
  const py::gil_scoped_acquire acquire;
  try {
    const py::object address = static_cast<Functions*>(context)->allocate(
        size_bytes, reinterpret_cast<std::uintptr_t>(stream.handle));
    return reinterpret_cast<void*>(address.cast<std::uintptr_t>());
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("allocate of cpattn.cuda_group");
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "allocate of cpattn.cuda_group: expected an address");
    PyErr_WriteUnraisable(static_cast<Functions*>(context)->allocate.ptr());
  }
  return nullptr;
}

void free(void* context, void* memory) noexcept {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire acquire;
  try {
    static_cast<Functions*>(context)->free(reinterpret_cast<std::uintptr_t>(memory));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("free of cpattn.cuda_group");
  }
}

}  // namespace

CudaAllocator allocator_from(const py::object& given) {
  if (given.is_none()) return {};
  constexpr const char* kExpected = ", expected None or a pair of functions: allocate, free";
  const bool is_pair = py::isinstance<py::sequence>(given) && py::len(given) == 2;
  require(is_pair, "allocator: ", std::string(py::repr(given)), kExpected);
  const auto functions =
      std::shared_ptr<Functions>(new Functions{given[py::int_(0)], given[py::int_(1)]}, forget);
  for (const py::object& function : {functions->allocate, functions->free}) {
    require(PyCallable_Check(function.ptr()) != 0, "allocator: ", std::string(py::repr(given)),
            kExpected);
  }
  return {.allocate = allocate, .free = free, .context = functions.get(), .owner = functions};
}

}  // namespace cpattn::python
