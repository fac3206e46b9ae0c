// Attention and PlannedAttention, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace cpattn::python {

void bind_attention(pybind11::module_& module);

}  // namespace cpattn::python
