#include "cp/bindings/group.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "cp/bindings/array.h"
#include "cp/bindings/call_stream.h"
#include "cp/bindings/memory_source.h"
#include "src/base/error.h"
#include "src/comm/max_over_ranks.h"
#include "src/comm/self_comm.h"
#ifdef CP_WITH_MPI
#include "src/comm/mpi_comm.h"
#endif

namespace cpattn::python {
namespace {

/// The range of the `timeout` option.
bool is_timeout(double seconds) { return seconds >= 0.001 && seconds <= 86400.0; }

/// One byte before everybody's own says whether they are data or a refusal: one message tells both.
enum class Kind : char { data, refusal };

std::vector<py::bytes> all_gather(Group& group, const py::object& data, const py::object& given) {
  double timeout = 60.0;
  std::string mine(1, static_cast<char>(Kind::data));
  const std::string complaint = complaint_of([&] {
    require(py::isinstance<py::bytes>(data), "data: a ",
            std::string(py::str(py::type::handle_of(data).attr("__name__"))), ", expected bytes");
    const auto seconds = given.cast<double>();
    require(is_timeout(seconds), "timeout: ", seconds, ", expected 0.001 to 86400");
    timeout = seconds;
    mine += std::string_view(py::reinterpret_borrow<py::bytes>(data));
  });
  if (!complaint.empty()) mine = static_cast<char>(Kind::refusal) + complaint;
  std::vector<std::vector<std::byte>> all;
  {
    const Group::Use use(group);
    const py::gil_scoped_release release;
    all = group.comm().all_gather(std::as_bytes(std::span(mine)), deadline_after(Seconds(timeout)),
                                  "all_gather");
  }
  std::vector<py::bytes> result;
  std::string refusals;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string_view text(reinterpret_cast<const char*>(all[rank].data()), all[rank].size());
    if (text.front() == static_cast<char>(Kind::refusal))
      refusals += detail::concat(refusals.empty() ? "" : "; ", "rank ", rank, ": ", text.substr(1));
    result.emplace_back(text.data() + 1, text.size() - 1);
  }
  require(refusals.empty(), refusals);
  return result;
}

std::string device_text(const Group& group) {
  return group.gpu() == nullptr ? "cpu" : detail::concat("cuda:", group.ordinal());
}

std::int64_t integer_of(const py::object& value, std::string_view name) {
  require(PyLong_Check(value.ptr()) != 0 && !py::isinstance<py::bool_>(value), name, ": ",
          std::string(py::repr(value)), ", expected an integer");
  return value.cast<std::int64_t>();
}

std::string group_text(const Group& group) {
  return detail::concat("<cpattn.Group rank ", group.comm().rank(), " of ", group.comm().size(),
                        ", device ", device_text(group), ", transport ",
                        group.shards()->transport(), ">");
}

/// Collective; every argument as it came, so that a wrong one is refused on all ranks.
std::shared_ptr<Group> cuda_group(Group& ranks, const py::object& device,
                                  const py::object& exchange, const py::object& nccl_comm,
                                  const py::object& backend, const py::object& allocator,
                                  const py::object& timeout) {
  GpuOptions options;
  const std::string complaint = complaint_of([&] {
    options.device = static_cast<int>(integer_of(device, "device"));
    std::optional<GpuExchange> known;
    if (py::isinstance<py::str>(exchange))
      known = from_name<GpuExchange>(exchange.cast<std::string>());
    require(known.has_value(), "exchange: ", std::string(py::repr(exchange)), ", expected ",
            choices<GpuExchange>());
    options.exchange = *known;
    if (!nccl_comm.is_none())
      options.nccl_comm = reinterpret_cast<void*>(integer_of(nccl_comm, "nccl_comm"));
    if (!backend.is_none()) options.backend = py::str(backend);
    const auto seconds = timeout.cast<double>();
    require(is_timeout(seconds), "timeout: ", seconds, ", expected 0.001 to 86400");
    options.timeout = Seconds(seconds);
    options.allocator = allocator_from(allocator);
  });
  const Group::Use use(ranks);
  const py::gil_scoped_release release;
  if (!complaint.empty()) GpuGroup::refuse(ranks.comm(), complaint);
  return std::make_shared<Group>(ranks, GpuGroup::make(ranks.shared(), options), options.device);
}

/// Collective.
void max_over_group(Group& group, const py::object& values, const py::object& given,
                    const py::object& timeout) {
  Array array;
  TensorView<float, 1> view;
  std::optional<CallStream> stream;
  double seconds = GpuOptions().timeout.count();
  const std::string complaint = complaint_of([&] {
    const auto asked = timeout.cast<double>();
    require(is_timeout(asked), "timeout: ", asked, ", expected 0.001 to 86400");
    seconds = asked;
    stream.emplace(group, given);
    array = stream->is_on_gpu() ? gpu_array_from(values, "values", group.ordinal(), *stream)
                                : array_from(values, "values");
    view = as_output_maxima(array);
    require(view.strides[0] == 1, "values: stride ", view.strides[0], ", expected 1");
    stream->begin();
  });
  const Group::Use use(group);
  const py::gil_scoped_release release;
  const auto deadline = deadline_after(Seconds(seconds));
  if (!complaint.empty()) refuse_max_over_ranks(group.comm(), complaint, deadline);
  max_over_ranks(*group.shards(), {view.data, static_cast<std::size_t>(view.shape[0])},
                 stream->get(), deadline);
}

#ifdef CP_WITH_MPI

/// `address` is where an MPI_Comm lies, as mpi4py's MPI._addressof() tells it.
std::shared_ptr<Group> group_at(std::uintptr_t address) {
  auto comm = std::make_shared<MpiCommunicator>(*reinterpret_cast<MPI_Comm*>(address));
  const int local_ranks = comm->node_place().size;
  return std::make_shared<Group>(std::move(comm), local_ranks);
}

std::shared_ptr<Group> world_group() {
  MPI_Comm world = MPI_COMM_WORLD;
  return group_at(reinterpret_cast<std::uintptr_t>(&world));
}

std::string mpi_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

bool is_mpi_running() {
  int is_initialized = 0, is_finalized = 0;
  MPI_Initialized(&is_initialized);
  MPI_Finalized(&is_finalized);
  return is_initialized != 0 && is_finalized == 0;
}

void bind_mpi(py::module_& module) {
  module.attr("has_mpi") = true;
  py::class_<MpiSession>(module, "MpiSession", "MPI_Init_thread now, MPI_Finalize when it goes.")
      .def(py::init([] { return new MpiSession(nullptr, nullptr); }))
      .def("give_up", &MpiSession::give_up, "Leave without the finalize that waits for all ranks.");
  module.def("group_at", &group_at, py::arg("address"));
  module.def("world_group", &world_group);
  module.def("mpi_version", &mpi_version);
  module.def("is_mpi_running", &is_mpi_running);
}

#else

void bind_mpi(py::module_& module) { module.attr("has_mpi") = false; }

#endif

}  // namespace

Group::~Group() {
  if (gpu_ == nullptr || PyGILState_Check() == 0) return;
  const py::gil_scoped_release release;
  own_stream_.reset();
  gpu_.reset();
}

Stream Group::own_stream() {
  if (own_stream_ == nullptr) own_stream_ = gpu_->make_stream();
  return own_stream_->get();
}

Group::Use::Use(Group& group) : group_(group) {
  require(!group.is_used_->exchange(true), "rank ", group.comm().rank(),
          ": this group is in use by another thread, expected one thread at a time");
}

void Group::agree(const std::string& lines, const std::string& complaint, Seconds timeout) {
  const Use use(*this);
  const py::gil_scoped_release release;
  if (comm_->size() == 1) return require(complaint.empty(), complaint);
  refuse_together(*comm_, complaint, deadline_after(timeout), "argument check");
  if (!lines.empty()) cpattn::agree(*comm_, lines, deadline_after(timeout));
}

void bind_group(py::module_& module) {
  // Python keeps what belongs to a group, such as plans, on the object itself.
  py::class_<Group, std::shared_ptr<Group>>(module, "Group", py::dynamic_attr())
      .def_property_readonly("rank", [](const Group& group) { return group.comm().rank(); })
      .def_property_readonly("size", [](const Group& group) { return group.comm().size(); })
      .def_property_readonly("transport",
                             [](const Group& group) { return group.shards()->transport(); })
      .def_property_readonly("device", &device_text)
      .def_property_readonly("local_ranks", &Group::local_ranks)
      .def(
          "agree",
          [](Group& group, const std::string& lines, const std::string& complaint, double timeout) {
            group.agree(lines, complaint, Seconds(timeout));
          },
          py::arg("lines"), py::arg("complaint") = "", py::arg("timeout") = 60.0)
      .def("all_gather", &all_gather, py::arg("data"), py::arg("timeout") = 60.0)
      .def("max_over_ranks", &max_over_group, py::arg("values"), py::arg("stream") = py::none(),
           py::arg("timeout") = 60.0)
      .def("__repr__", &group_text);
  module.def("cuda_group", &cuda_group, py::arg("ranks"), py::arg("device"), py::arg("exchange"),
             py::arg("nccl_comm"), py::arg("backend"), py::arg("allocator"), py::arg("timeout"));
  module.def("self_group",
             [] { return std::make_shared<Group>(std::make_shared<SelfCommunicator>(), 1); });
  bind_mpi(module);
}

}  // namespace cpattn::python
