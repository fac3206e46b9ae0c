#include "cp/bindings/reference.h"

#include <pybind11/numpy.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "cp/bindings/array.h"
#include "cp/plan.h"
#include "kernels/reference/attention.h"
#include "kernels/reference/gradient.h"
#include "src/base/error.h"

namespace cpattn::python {
namespace {

reference::Tensor as_reference(const Array& array) {
  if (array.element != Element::f64) return as_tensor(array);
  TensorView<const double, 3> view{.data = static_cast<const double*>(array.data)};
  require(array.shape.size() == 3, array.name, ": ", array.shape.size(),
          " dimensions, expected three: tokens, heads, channels");
  for (std::size_t i = 0; i < 3; ++i) {
    view.shape[i] = array.shape[i];
    view.strides[i] = array.strides[i];
  }
  if (view.shape[2] <= 1) view.strides[2] = 1;
  return view;
}

/// A numpy array that takes the vector over.
py::array_t<double> to_numpy(std::vector<double> values, const std::vector<std::int64_t>& shape) {
  auto held = std::make_unique<std::vector<double>>(std::move(values));
  double* data = held->data();
  const py::capsule owner(held.release(),
                          [](void* vector) { delete static_cast<std::vector<double>*>(vector); });
  return py::array_t<double>(shape, data, owner);
}

MaskKind mask_of(bool is_causal) { return is_causal ? MaskKind::causal : MaskKind::full; }

py::tuple forward(const Problem& problem, bool causal, const py::object& q, const py::object& k,
                  const py::object& v, int threads) {
  const Array arrays[] = {array_from(q, "q"), array_from(k, "k"), array_from(v, "v")};
  const reference::AttentionArgs args{.shape = problem.shape,
                                      .batch = problem.batch,
                                      .mask = mask_of(causal),
                                      .q = as_reference(arrays[0]),
                                      .k = as_reference(arrays[1]),
                                      .v = as_reference(arrays[2]),
                                      .rows = {},
                                      .num_threads = threads};
  reference::AttentionResult result;
  {
    const py::gil_scoped_release release;
    result = reference::attention(args);
  }
  const std::int64_t rows = problem.batch.q_rows, heads = problem.shape.num_heads;
  return py::make_tuple(to_numpy(std::move(result.out), {rows, heads, problem.shape.value_dim}),
                        to_numpy(std::move(result.lse), {rows, heads}));
}

py::tuple backward(const Problem& problem, bool causal, const py::object& q, const py::object& k,
                   const py::object& v, const py::object& dout, const py::object& dlse,
                   int threads) {
  const Array arrays[] = {array_from(q, "q"), array_from(k, "k"), array_from(v, "v"),
                          array_from(dout, "dout"), array_from(dlse, "dlse")};
  const reference::GradientArgs args{.shape = problem.shape,
                                     .batch = problem.batch,
                                     .mask = mask_of(causal),
                                     .q = as_reference(arrays[0]),
                                     .k = as_reference(arrays[1]),
                                     .v = as_reference(arrays[2]),
                                     .dout = as_reference(arrays[3]),
                                     .dlse = as_reference(arrays[4]),
                                     .num_threads = threads};
  reference::Gradient result;
  {
    const py::gil_scoped_release release;
    result = reference::gradient(args);
  }
  const AttentionShape& shape = problem.shape;
  const std::int64_t q_rows = problem.batch.q_rows, kv_rows = problem.batch.kv_rows;
  return py::make_tuple(
      to_numpy(std::move(result.dq.values), {q_rows, shape.num_heads, shape.head_dim}),
      to_numpy(std::move(result.dk.values), {kv_rows, shape.num_kv_heads, shape.head_dim}),
      to_numpy(std::move(result.dv.values), {kv_rows, shape.num_kv_heads, shape.value_dim}));
}

}  // namespace

void bind_reference(py::module_& module) {
  module.def("reference_forward", &forward, py::arg("problem"), py::arg("causal"), py::arg("q"),
             py::arg("k"), py::arg("v"), py::arg("threads"));
  module.def("reference_backward", &backward, py::arg("problem"), py::arg("causal"), py::arg("q"),
             py::arg("k"), py::arg("v"), py::arg("dout"), py::arg("dlse"), py::arg("threads"));
}

}  // namespace cpattn::python
