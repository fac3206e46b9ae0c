// Sharding tools and the ordered sum, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace cpattn::python {

void bind_tools(pybind11::module_& module);

}  // namespace cpattn::python
