#include "cp/bindings/tools.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cp/bindings/array.h"
#include "cp/bindings/group.h"
#include "cp/bindings/options.h"
#include "cp/plan.h"
#include "cp/shard_tools.h"
#include "src/base/error.h"
#include "src/comm/ordered_sum.h"

namespace cpattn::python {
namespace {

using Integers = std::vector<std::int64_t>;

py::array_t<std::int64_t> to_numpy(const Integers& values) {
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

/// Who owns what, of all ranks; ranks are numbered, so no communicator is needed.
class PySharding {
 public:
  PySharding(const Problem& problem, const py::dict& options, int world_size)
      : batch_(problem.batch), config_(config_from(options)), world_size_(world_size) {
    std::string refusal;
    for (const std::string& item : problems_with(problem, config_, 0, world_size_))
      refusal += (refusal.empty() ? "" : "; ") + item;
    require(refusal.empty(), refusal);
    sharding_ = make_sharding(batch_, config_, world_size_);
  }

  py::array_t<std::int64_t> index(int rank, bool of_keys) const {
    return to_numpy(global_rows(chunks(rank, of_keys)));
  }
  py::array_t<std::int64_t> positions(int rank, bool of_keys) const {
    return to_numpy(cpattn::positions(chunks(rank, of_keys)));
  }
  py::array_t<std::int64_t> local_cu_seqlens(int rank, bool of_keys) const {
    return to_numpy(cpattn::local_cu_seqlens(static_cast<std::int64_t>(batch_.documents.size()),
                                             chunks(rank, of_keys)));
  }
  py::array_t<std::int64_t> next_token_targets(const Integers& tokens, int rank,
                                               std::int64_t ignore) const {
    return to_numpy(cpattn::next_token_targets(tokens, batch_, chunks(rank, false), ignore));
  }
  std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> leaves(int rank) const {
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> result;
    for (const LeafRows& rows : leaf_rows(batch_, config_, world_size_, chunks(rank, false)))
      result.emplace_back(rows.leaf, rows.begin, rows.begin + rows.num_rows);
    return result;
  }
  std::int64_t num_leaves() const { return cpattn::num_leaves(batch_, config_, world_size_); }

 private:
  const std::vector<OwnedChunk>& chunks(int rank, bool of_keys) const {
    require(rank >= 0 && rank < world_size_, "rank: ", rank, ", expected 0 to ", world_size_ - 1);
    const Shard& shard = sharding_.shards[static_cast<std::size_t>(rank)];
    return of_keys ? shard.kv : shard.q;
  }

  SequenceBatch batch_;
  CpConfig config_;
  int world_size_;
  Sharding sharding_;
};

template <class T>
std::span<T> as_span(const Array& array, Element element, std::int64_t size) {
  require(array.element == element, array.name, ": dtype ", numpy_name(array.element),
          ", expected ", numpy_name(element));
  std::int64_t step = 1;
  for (std::size_t i = array.shape.size(); i-- > 0;) {
    require(array.shape[i] <= 1 || array.strides[i] == step, array.name,
            ": strides with gaps, expected contiguous memory");
    step *= array.shape[i];
  }
  require(step == size, array.name, ": ", step, " numbers, expected ", size);
  return {static_cast<T*>(array.data), static_cast<std::size_t>(size)};
}

template <class T>
class PyOrderedSum {
 public:
  PyOrderedSum(std::shared_ptr<Group> group, std::int64_t num_leaves, std::int64_t size)
      : group_(std::move(group)), sum_(num_leaves, size) {}

  void add(std::int64_t leaf, const py::object& values) {
    const Array array = array_from(values, "values");
    sum_.add(leaf, as_span<const T>(array, kElement, sum_.size()));
  }

  void refuse(const std::string& why) { sum_.refuse(why); }

  void all_reduce(const py::object& result, double timeout) {
    Array array;
    std::span<T> target;
    const std::string complaint = complaint_of([&] {
      array = array_from(result, "result");
      require(!array.is_read_only, "result: read-only memory, expected an array to write to");
      target = as_span<T>(array, kElement, sum_.size());
    });
    if (!complaint.empty()) sum_.refuse(complaint);
    const Group::Use use(*group_);
    const py::gil_scoped_release release;
    sum_.all_reduce(group_->comm(), target, deadline_after(Seconds(timeout)));
  }

 private:
  static constexpr Element kElement = sizeof(T) == 4 ? Element::f32 : Element::f64;

  std::shared_ptr<Group> group_;
  OrderedSum<T> sum_;
};

template <class T>
void bind_ordered_sum(py::module_& module, const char* name) {
  using Sum = PyOrderedSum<T>;
  py::class_<Sum>(module, name)
      .def(py::init<std::shared_ptr<Group>, std::int64_t, std::int64_t>(), py::arg("group"),
           py::arg("num_leaves"), py::arg("size"))
      .def("add", &Sum::add, py::arg("leaf"), py::arg("values"))
      .def("refuse", &Sum::refuse, py::arg("why"))
      .def("all_reduce", &Sum::all_reduce, py::arg("result"), py::arg("timeout") = 60.0);
}

}  // namespace

void bind_tools(py::module_& module) {
  py::class_<PySharding>(module, "Sharding")
      .def(py::init<const Problem&, const py::dict&, int>(), py::arg("problem"), py::arg("options"),
           py::arg("world_size"))
      .def("index", &PySharding::index, py::arg("rank"), py::arg("of_keys"))
      .def("positions", &PySharding::positions, py::arg("rank"), py::arg("of_keys"))
      .def("local_cu_seqlens", &PySharding::local_cu_seqlens, py::arg("rank"), py::arg("of_keys"))
      .def("next_token_targets", &PySharding::next_token_targets, py::arg("tokens"),
           py::arg("rank"), py::arg("ignore"))
      .def("leaves", &PySharding::leaves, py::arg("rank"))
      .def_property_readonly("num_leaves", &PySharding::num_leaves);
  bind_ordered_sum<float>(module, "OrderedSumFloat32");
  bind_ordered_sum<double>(module, "OrderedSumFloat64");
}

}  // namespace cpattn::python
