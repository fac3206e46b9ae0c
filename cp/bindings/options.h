// CpConfig from keyword arguments: the same names as the YAML keys, checked one by one.
#pragma once

#include <pybind11/pybind11.h>

#include "cp/config.h"

namespace cpattn::python {

/// InvalidArgument for an unknown name or a value of the wrong type; ranges are judged by the plan.
CpConfig config_from(const pybind11::dict& options);

/// Every option with its value, in the order of the declaration.
pybind11::dict options_of(const CpConfig& config);

}  // namespace cpattn::python
