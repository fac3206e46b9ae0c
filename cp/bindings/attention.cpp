#include "cp/bindings/attention.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>

#include "cp/bindings/array.h"
#include "cp/bindings/group.h"
#include "cp/bindings/options.h"
#include "cp/context_parallel.h"
#include "src/base/error.h"

namespace cpattn::python {
namespace {

using Lengths = std::vector<std::int64_t>;

/// The arrays of one call, and its stream: each array is held as long as its view is used. On a GPU
/// that is until the call returns: what the caller's allocator does with the memory then comes
/// after the work, in the order of its stream.
class Arguments {
 public:
  Arguments(Group& group, const py::object& stream)
      : stream_(group, stream), ordinal_(group.ordinal()) {}

  const CallStream& stream() const { return stream_; }
  const Array& hold(const py::object& object, std::string_view name) {
    return held_.emplace_back(stream_.is_on_gpu() ? gpu_array_from(object, name, ordinal_, stream_)
                                                  : array_from(object, name));
  }

 private:
  CallStream stream_;
  int ordinal_;
  std::deque<Array> held_;
};

class PyPlan {
 public:
  PyPlan(std::shared_ptr<Group> group, std::unique_ptr<PlannedAttention> planned)
      : group_(std::move(group)), planned_(std::move(planned)) {}
  /// On a GPU it waits for the work that was given to it, which may itself call Python.
  ~PyPlan() {
    const py::gil_scoped_release release;
    planned_.reset();
  }
  PyPlan(const PyPlan&) = delete;
  PyPlan& operator=(const PyPlan&) = delete;

  const Plan& plan() const { return planned_->plan(); }

  /// Takes part in the others' forward() or backward(), which begin with it: InvalidArgument on all
  /// ranks when any has a complaint.
  void refuse(const std::string& complaint) {
    group_->agree("", complaint, Seconds(plan().config().timeout_seconds));
  }

  void forward(const py::object& q, const py::object& k, const py::object& v, const py::object& out,
               const py::object& lse, const py::object& head_maxima, const py::object& stream) {
    std::optional<Arguments> held;
    ForwardTensors tensors;
    refuse_together([&] {
      Arguments& arguments = held.emplace(*group_, stream);
      tensors = {.q = as_tensor(arguments.hold(q, "q")),
                 .k = as_tensor(arguments.hold(k, "k")),
                 .v = as_tensor(arguments.hold(v, "v")),
                 .out = as_output_tensor(arguments.hold(out, "out")),
                 .lse = as_output_lse(arguments.hold(lse, "lse"))};
      if (!head_maxima.is_none())
        tensors.head_maxima = as_output_maxima(arguments.hold(head_maxima, "head_maxima"));
      arguments.stream().begin();
    });
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    planned_->forward(tensors, held->stream().get());
    held->stream().end();
  }

  void backward(const py::object& q, const py::object& k, const py::object& v,
                const py::object& out, const py::object& lse, const py::object& dout,
                const py::object& dlse, const py::object& dq, const py::object& dk,
                const py::object& dv, const py::object& stream) {
    std::optional<Arguments> held;
    BackwardTensors tensors;
    refuse_together([&] {
      Arguments& arguments = held.emplace(*group_, stream);
      tensors = {.q = as_tensor(arguments.hold(q, "q")),
                 .k = as_tensor(arguments.hold(k, "k")),
                 .v = as_tensor(arguments.hold(v, "v")),
                 .out = as_tensor(arguments.hold(out, "out")),
                 .lse = as_lse(arguments.hold(lse, "lse")),
                 .dout = as_tensor(arguments.hold(dout, "dout")),
                 .dlse = {},
                 .dq = as_output_tensor(arguments.hold(dq, "dq")),
                 .dk = as_output_tensor(arguments.hold(dk, "dk")),
                 .dv = as_output_tensor(arguments.hold(dv, "dv"))};
      if (!dlse.is_none()) tensors.dlse = as_lse(arguments.hold(dlse, "dlse"));
      arguments.stream().begin();
    });
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    planned_->backward(tensors, held->stream().get());
    held->stream().end();
  }

  void prepare_backward() {
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    planned_->prepare_backward();
  }

  void shard_rows(const py::object& global, const py::object& local, bool of_keys,
                  const py::object& stream) {
    Arguments arguments(*group_, stream);
    const AnyConstTensor from = as_tensor(arguments.hold(global, "x"));
    const AnyTensor to = as_output_tensor(arguments.hold(local, "out"));
    arguments.stream().begin();
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    planned_->shard_rows(of_keys ? ShardSide::kv : ShardSide::q, from, to,
                         arguments.stream().get());
    arguments.stream().end();
  }

  void unshard_rows(const py::object& local, const py::object& global, bool of_keys,
                    const py::object& stream) {
    Arguments arguments(*group_, stream);
    const AnyConstTensor from = as_tensor(arguments.hold(local, "x"));
    const AnyTensor to = as_output_tensor(arguments.hold(global, "out"));
    arguments.stream().begin();
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    planned_->unshard_rows(of_keys ? ShardSide::kv : ShardSide::q, from, to,
                           arguments.stream().get());
    arguments.stream().end();
  }

  void reset_head_maxima(const py::object& head_maxima, const py::object& stream) {
    Arguments arguments(*group_, stream);
    const auto view = as_output_maxima(arguments.hold(head_maxima, "head_maxima"));
    arguments.stream().begin();
    planned_->reset_head_maxima(view, arguments.stream().get());
    arguments.stream().end();
  }

 private:
  /// A rank whose arguments are no tensors at all must not leave the others waiting.
  template <class Import>
  void refuse_together(Import&& import) {
    refuse(complaint_of(import));
  }

  std::shared_ptr<Group> group_;
  std::unique_ptr<PlannedAttention> planned_;
};

const KernelTable& kernels_named(const std::optional<std::string>& isa) {
  if (!isa) return default_kernels();
  const std::optional<Isa> known = from_name<Isa>(*isa);
  require(known.has_value(), "isa: ", *isa, ", expected ", choices<Isa>());
  return find_kernels(*known);
}

const KernelTable& kernels_of(const Group& group, const std::optional<std::string>& isa) {
  if (group.gpu() == nullptr) return kernels_named(isa);
  require(!isa, "isa: ", isa.value_or(""), ", expected None: the kernels are those of the GPU");
  return group.gpu()->kernels();
}

class PyAttention {
 public:
  PyAttention(std::shared_ptr<Group> group, const py::dict& options,
              const std::optional<std::string>& isa)
      : group_(std::move(group)),
        attention_(group_->shards(), config_from(options), &kernels_of(*group_, isa)) {}

  std::unique_ptr<PyPlan> plan(const Problem& problem) const {
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    return std::make_unique<PyPlan>(group_, attention_.plan(problem));
  }

  void refuse_plan(const std::string& why) const {
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    attention_.refuse_plan(why);
  }

  std::string explain(const Problem& problem) const {
    return attention_.explain(problem).to_json();
  }

  py::dict options() const { return options_of(attention_.config()); }

 private:
  std::shared_ptr<Group> group_;
  ContextParallelAttention attention_;
};

std::int64_t rows_of(const Lengths& cu_seqlens) {
  return cu_seqlens.empty() ? 0 : *std::max_element(cu_seqlens.begin(), cu_seqlens.end());
}

Problem make_problem(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                     std::int64_t value_dim, double softmax_scale, const Lengths& cu_seqlens_q,
                     const Lengths& cu_seqlens_kv, const py::object& dtype,
                     const py::object& out_dtype) {
  return {.shape = {num_heads, num_kv_heads, head_dim, value_dim, softmax_scale},
          .batch = batch_from_cu_seqlens(cu_seqlens_q, cu_seqlens_kv, rows_of(cu_seqlens_q),
                                         rows_of(cu_seqlens_kv)),
          .dtype = dtype_of(element_named(dtype, "dtype"), "dtype"),
          .out_dtype = dtype_of(element_named(out_dtype, "out_dtype"), "out_dtype")};
}

py::array_t<std::int64_t> index_of(const std::vector<OwnedChunk>& chunks) {
  const Lengths rows = global_rows(chunks);
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(rows.size()), rows.data());
}

void bind_plan(py::module_& module) {
  py::class_<PyPlan>(module, "Plan")
      .def("refuse", &PyPlan::refuse, py::arg("complaint"))
      .def("forward", &PyPlan::forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
           py::arg("lse"), py::arg("head_maxima"), py::arg("stream"))
      .def("prepare_backward", &PyPlan::prepare_backward)
      .def("reset_head_maxima", &PyPlan::reset_head_maxima, py::arg("head_maxima"),
           py::arg("stream"))
      .def("shard_rows", &PyPlan::shard_rows, py::arg("x"), py::arg("out"), py::arg("of_keys"),
           py::arg("stream"))
      .def("unshard_rows", &PyPlan::unshard_rows, py::arg("x"), py::arg("out"), py::arg("of_keys"),
           py::arg("stream"))
      .def("backward", &PyPlan::backward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
           py::arg("lse"), py::arg("dout"), py::arg("dlse"), py::arg("dq"), py::arg("dk"),
           py::arg("dv"), py::arg("stream"))
      .def_property_readonly("q_rows", [](const PyPlan& p) { return p.plan().shard().q_rows; })
      .def_property_readonly("kv_rows", [](const PyPlan& p) { return p.plan().shard().kv_rows; })
      .def_property_readonly("q_index",
                             [](const PyPlan& p) { return index_of(p.plan().shard().q); })
      .def_property_readonly("kv_index",
                             [](const PyPlan& p) { return index_of(p.plan().shard().kv); })
      .def_property_readonly("kernels", [](const PyPlan& p) { return p.plan().kernels().name; })
      .def_property_readonly("guarantee", [](const PyPlan& p) { return p.plan().guarantee(); });
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<Problem>(module, "Problem")
      .def(py::init(&make_problem), py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("value_dim"), py::arg("softmax_scale"),
           py::arg("cu_seqlens_q"), py::arg("cu_seqlens_kv"), py::arg("dtype"),
           py::arg("out_dtype"));
  bind_plan(module);
  py::class_<PyAttention>(module, "Attention")
      .def(py::init<std::shared_ptr<Group>, const py::dict&, const std::optional<std::string>&>(),
           py::arg("group"), py::arg("options"), py::arg("isa"))
      .def("plan", &PyAttention::plan, py::arg("problem"))
      .def("refuse_plan", &PyAttention::refuse_plan, py::arg("why"))
      .def("explain", &PyAttention::explain, py::arg("problem"))
      .def_property_readonly("options", &PyAttention::options);
  module.def(
      "dtype_name",
      [](const py::object& dtype) { return numpy_name(element_named(dtype, "dtype")); },
      py::arg("dtype"));
}

}  // namespace cpattn::python
