#include "cp/bindings/attention.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "cp/bindings/array.h"
#include "cp/bindings/group.h"
#include "cp/bindings/options.h"
#include "cp/plan.h"
#include "cp/ring_attention.h"
#include "src/base/error.h"

namespace cpattn::python {
namespace {

using Lengths = std::vector<std::int64_t>;

class PyPlan {
 public:
  PyPlan(std::shared_ptr<Group> group, const CpConfig& config, const KernelTable& kernels,
         const Problem& problem)
      : group_(std::move(group)),
        plan_(problem, config, kernels, group_->comm().rank(), group_->comm().size()),
        ring_(plan_, group_->comm()) {}

  Group& group() const { return *group_; }
  const Plan& plan() const { return plan_; }

  void forward(const py::object& q, const py::object& k, const py::object& v, const py::object& out,
               const py::object& lse) {
    std::vector<Array> held;
    ForwardTensors tensors;
    refuse_together([&] {
      const auto hold = [&](const py::object& object, std::string_view name) -> const Array& {
        return held.emplace_back(array_from(object, name));
      };
      tensors = {.q = as_tensor(hold(q, "q")),
                 .k = as_tensor(hold(k, "k")),
                 .v = as_tensor(hold(v, "v")),
                 .out = as_output_tensor(hold(out, "out")),
                 .lse = as_output_lse(hold(lse, "lse"))};
    });
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    ring_.forward(tensors);
  }

 private:
  /// A rank whose arguments are no tensors at all must not leave the others waiting.
  template <class Import>
  void refuse_together(Import&& import) {
    std::string complaint;
    try {
      import();
    } catch (const InvalidArgument& error) {
      complaint = error.what();
    }
    group_->agree("", complaint, Seconds(plan_.config().timeout_seconds));
  }

  std::shared_ptr<Group> group_;
  Plan plan_;
  RingAttention ring_;
};

py::array_t<std::int64_t> to_numpy(const Lengths& values) {
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

const KernelTable& kernels_named(const std::optional<std::string>& isa) {
  if (!isa) return default_kernels();
  const std::optional<Isa> known = from_name<Isa>(*isa);
  require(known.has_value(), "isa: ", *isa, ", expected ", choices<Isa>());
  return find_kernels(*known);
}

std::unique_ptr<PyPlan> make_plan(std::shared_ptr<Group> group, const py::dict& options,
                                  const std::optional<std::string>& isa,
                                  const AttentionShape& shape, const Lengths& cu_seqlens_q,
                                  const Lengths& cu_seqlens_kv, const py::object& dtype,
                                  const py::object& out_dtype) {
  const CpConfig config = config_from(options);
  const KernelTable& kernels = kernels_named(isa);
  const Problem problem{
      .shape = shape,
      .batch = batch_from_cu_seqlens(cu_seqlens_q, cu_seqlens_kv,
                                     cu_seqlens_q.empty() ? 0 : cu_seqlens_q.back(),
                                     cu_seqlens_kv.empty() ? 0 : cu_seqlens_kv.back()),
      .dtype = dtype_of(element_named(dtype, "dtype"), "dtype"),
      .out_dtype = dtype_of(element_named(out_dtype, "out_dtype"), "out_dtype")};
  Group& used = *group;
  const Group::Use use(used);
  const py::gil_scoped_release release;
  return std::make_unique<PyPlan>(std::move(group), config, kernels, problem);
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<AttentionShape>(module, "Shape")
      .def(py::init([](std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                       std::int64_t value_dim, double softmax_scale) {
             return AttentionShape{num_heads, num_kv_heads, head_dim, value_dim, softmax_scale};
           }),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("value_dim"),
           py::arg("softmax_scale"));

  py::class_<PyPlan>(module, "Plan")
      .def(py::init(&make_plan), py::arg("group"), py::arg("options"), py::arg("isa"),
           py::arg("shape"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_kv"), py::arg("dtype"),
           py::arg("out_dtype"))
      .def("forward", &PyPlan::forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
           py::arg("lse"))
      .def_property_readonly("options",
                             [](const PyPlan& self) { return options_of(self.plan().config()); })
      .def_property_readonly("q_rows",
                             [](const PyPlan& self) { return self.plan().shard().q_rows; })
      .def_property_readonly("kv_rows",
                             [](const PyPlan& self) { return self.plan().shard().kv_rows; })
      .def_property_readonly(
          "q_index",
          [](const PyPlan& self) { return to_numpy(global_rows(self.plan().shard().q)); })
      .def_property_readonly(
          "kv_index",
          [](const PyPlan& self) { return to_numpy(global_rows(self.plan().shard().kv)); })
      .def_property_readonly("kernels",
                             [](const PyPlan& self) { return self.plan().kernels().name; })
      .def_property_readonly("guarantee",
                             [](const PyPlan& self) { return self.plan().guarantee(); });

  module.def(
      "dtype_name",
      [](const py::object& dtype) { return numpy_name(element_named(dtype, "dtype")); },
      py::arg("dtype"));
  module.def(
      "check_options", [](const py::dict& options) { config_from(options); }, py::arg("options"));
  module.def("default_options", [] { return options_of(CpConfig{}); });
}

}  // namespace cpattn::python
