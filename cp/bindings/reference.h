// The double-precision reference as Python sees it: what gradcheck differentiates.
#pragma once

#include <pybind11/pybind11.h>

namespace cpattn::python {

void bind_reference(pybind11::module_& module);

}  // namespace cpattn::python
