#include "cp/bindings/c_api.h"

#include <cstring>

#include "cp/bindings/c_convert.h"
#include "cp/bindings/c_handles.h"
#include "src/comm/self_comm.h"
#ifdef CP_WITH_MPI
#include "src/comm/mpi_comm.h"
#endif

namespace cpattn::c {
namespace {

template <class Handle>
void require_place(Handle** handle, std::string_view name) {
  require(handle != nullptr, name, ": NULL, expected the address of a handle");
}

#ifdef CP_WITH_MPI
MpiOptions options_of(const cpattn_group_options* options) {
  if (options == nullptr) return {};
  const std::int64_t bytes = read_struct(options, "group_options").max_message_bytes;
  require(bytes > 0, "max_message_bytes ", bytes, ": expected at least 1");
  return {.max_message_bytes = static_cast<std::size_t>(bytes)};
}
/// What is wrong on one rank is refused on all, as soon as there is a communicator to tell them by.
void give_mpi_group(MPI_Comm comm, const cpattn_group_options* options, cpattn_group** group) {
  const MpiOptions known = made_or_refused(
      [&] {
        require_place(group, "group");
        return options_of(options);
      },
      [&](const char* why) { MpiCommunicator::refuse(comm, why); });
  give(group, std::make_shared<Group>(std::make_shared<MpiCommunicator>(comm, known)));
}
#else
[[noreturn]] void refuse_mpi() {
  throw Unsupported("this library was built without MPI: configure it with -DCP_WITH_MPI=ON");
}
#endif

}  // namespace
}  // namespace cpattn::c

using namespace cpattn;  // NOLINT: this file is the border

const char* cpattn_version(void) { return CP_VERSION; }

const char* cpattn_status_name(cpattn_status status) {
  switch (status) {
    case CPATTN_OK:
      return "ok";
    case CPATTN_INVALID_ARGUMENT:
      return "invalid argument";
    case CPATTN_UNSUPPORTED:
      return "unsupported";
    case CPATTN_COMM_ERROR:
      return "communication error";
    case CPATTN_INTERNAL_ERROR:
      return "internal error";
    case CPATTN_OUT_OF_MEMORY:
      return "out of memory";
    case CPATTN_DEVICE_ERROR:
      return "device error";
  }
  return "not a status";
}

cpattn_status cpattn_group_self(cpattn_group** group) {
  return c::guarded([&] {
    c::require_place(group, "group");
    c::give(group, std::make_shared<c::Group>(std::make_shared<SelfCommunicator>()));
  });
}

#ifdef CP_WITH_MPI

cpattn_status cpattn_group_from_mpi(const void* mpi_comm, size_t size,
                                    const cpattn_group_options* options, cpattn_group** group) {
  return c::guarded([&] {
    require(mpi_comm != nullptr, "mpi_comm: NULL, expected the address of an MPI_Comm");
    require(size == sizeof(MPI_Comm), "size is ", size,
            ", expected sizeof(MPI_Comm) = ", sizeof(MPI_Comm),
            " of the MPI this library was built with");
    MPI_Comm comm = MPI_COMM_NULL;
    std::memcpy(&comm, mpi_comm, sizeof comm);
    c::give_mpi_group(comm, options, group);
  });
}

cpattn_status cpattn_group_from_mpi_fortran(int mpi_comm, const cpattn_group_options* options,
                                            cpattn_group** group) {
  return c::guarded([&] { c::give_mpi_group(MPI_Comm_f2c(mpi_comm), options, group); });
}

#else

cpattn_status cpattn_group_from_mpi(const void*, size_t, const cpattn_group_options*,
                                    cpattn_group**) {
  return c::guarded(c::refuse_mpi);
}
cpattn_status cpattn_group_from_mpi_fortran(int, const cpattn_group_options*, cpattn_group**) {
  return c::guarded(c::refuse_mpi);
}

#endif

cpattn_status cpattn_group_rank(cpattn_group* group, int* rank) {
  return c::guarded([&] {
    const auto object = c::object_of(group);
    require(rank != nullptr, "rank: NULL");
    *rank = object->ranks->rank();
  });
}

cpattn_status cpattn_group_size(cpattn_group* group, int* size) {
  return c::guarded([&] {
    const auto object = c::object_of(group);
    require(size != nullptr, "size: NULL");
    *size = object->ranks->size();
  });
}

cpattn_status cpattn_group_free(cpattn_group** group) {
  return c::guarded([&] { c::take_back(group); });
}

cpattn_status cpattn_attention_create(cpattn_group* group, const cpattn_setting* settings,
                                      size_t num_settings, cpattn_attention** attention) {
  return c::guarded([&] {
    c::require_place(attention, "attention");
    const auto object = c::object_of(group);
    require(settings != nullptr || num_settings == 0, "settings: NULL, but num_settings is ",
            num_settings);
    const c::Settings parsed = c::settings_of({settings, num_settings});
    const bool is_on_gpu = object->gpu != nullptr;
    require(!is_on_gpu || parsed.kernels == nullptr,
            "isa is set, expected none: the kernels are those of the GPU");
    c::give(attention, std::make_shared<ContextParallelAttention>(
                           object->shards(), parsed.config,
                           is_on_gpu ? &object->gpu->kernels() : parsed.kernels));
  });
}

cpattn_status cpattn_attention_free(cpattn_attention** attention) {
  return c::guarded([&] { c::take_back(attention); });
}

cpattn_status cpattn_explain(cpattn_attention* attention, const cpattn_problem* problem, char* text,
                             size_t capacity, size_t* size) {
  return c::guarded([&] {
    const auto object = c::object_of(attention);
    require(size != nullptr, "size: NULL");
    require(text != nullptr || capacity == 0, "text: NULL, but capacity is ", capacity);
    require(problem != nullptr, "problem: NULL");
    Explanation answer;
    try {
      answer = object->explain(c::problem_of(problem));
    } catch (const InvalidArgument& error) {  // cannot even be stated: that is a refusal, too
      answer.refusals.emplace_back(error.what());
    }
    const std::string json = answer.to_json();
    *size = json.size() + 1;
    if (capacity >= *size) std::memcpy(text, json.c_str(), *size);
  });
}

cpattn_status cpattn_plan_create(cpattn_attention* attention, const cpattn_problem* problem,
                                 cpattn_plan** plan) {
  return c::guarded([&] {
    const auto object = c::object_of(attention);
    const Problem stated = c::made_or_refused(
        [&] {
          c::require_place(plan, "plan");
          return c::problem_of(problem);
        },
        [&](const char* why) { object->refuse_plan(why); });
    c::give(plan, object->plan(stated));
  });
}

cpattn_status cpattn_plan_free(cpattn_plan** plan) {
  return c::guarded([&] { c::take_back(plan); });
}

cpattn_status cpattn_forward(cpattn_plan* plan, const cpattn_forward_tensors* tensors) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    const Stream stream = c::stream_of(tensors);
    object->forward(
        c::made_or_refused([&] { return c::tensors_of(tensors); },
                           [&](const char* why) { object->refuse_forward(why, stream); }),
        stream);
  });
}

cpattn_status cpattn_backward(cpattn_plan* plan, const cpattn_backward_tensors* tensors) {
  return c::guarded([&] {
    const auto object = c::object_of(plan);
    const Stream stream = c::stream_of(tensors);
    object->backward(
        c::made_or_refused([&] { return c::tensors_of(tensors); },
                           [&](const char* why) { object->refuse_backward(why, stream); }),
        stream);
  });
}
