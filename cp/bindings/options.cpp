#include "cp/bindings/options.h"

#include <concepts>
#include <string>

#include "src/base/error.h"

namespace cpattn::python {
namespace {

namespace py = pybind11;

std::string shown(const py::handle& value) { return py::repr(value); }

void assign(const FieldInfo& field, const py::handle& value, bool& target) {
  require(py::isinstance<py::bool_>(value), field.name, ": ", shown(value),
          ", expected True or False");
  target = value.cast<bool>();
}

void assign(const FieldInfo& field, const py::handle& value, std::int64_t& target) {
  require(PyLong_Check(value.ptr()) != 0 && !py::isinstance<py::bool_>(value), field.name, ": ",
          shown(value), ", expected an integer");
  int overflow = 0;
  target = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  require(overflow == 0, field.name, ": ", shown(value), ", expected a 64-bit integer");
}

void assign(const FieldInfo& field, const py::handle& value, double& target) {
  const bool is_number = PyFloat_Check(value.ptr()) != 0 ||
                         (PyLong_Check(value.ptr()) != 0 && !py::isinstance<py::bool_>(value));
  require(is_number, field.name, ": ", shown(value), ", expected a number");
  target = value.cast<double>();
}

template <NamedEnum E>
void assign(const FieldInfo& field, const py::handle& value, E& target) {
  std::optional<E> known;
  if (py::isinstance<py::str>(value)) known = from_name<E>(value.cast<std::string>());
  require(known.has_value(), field.name, ": ", shown(value), ", expected ", choices<E>());
  target = *known;
}

}  // namespace

CpConfig config_from(const py::dict& options) {
  CpConfig config;
  std::string names;
  py::dict left = options.attr("copy")();
  for_each_cp_field(config, [&](const FieldInfo& field, auto& target) {
    const py::str name{std::string(field.name)};
    // Callers say causal=True or False, from which Python's half makes the mask.
    const std::string_view shown_name = field.name == "mask" ? "causal" : field.name;
    names += (names.empty() ? "" : " | ") + std::string(shown_name);
    if (!left.contains(name)) return;
    assign(field, left.attr("pop")(name), target);
  });
  for (const auto& [name, value] : left)
    throw InvalidArgument(detail::concat("option ", shown(name), ": unknown, expected ", names));
  return config;
}

py::dict options_of(const CpConfig& config) {
  py::dict options;
  for_each_cp_field(config, [&](const FieldInfo& field, const auto& value) {
    const py::str name{std::string(field.name)};
    if constexpr (NamedEnum<std::remove_cvref_t<decltype(value)>>) {
      options[name] = py::str(std::string(name_of(value)));
    } else {
      options[name] = py::cast(value);
    }
  });
  return options;
}

}  // namespace cpattn::python
