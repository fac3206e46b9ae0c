// What every function of the C face needs: exceptions become statuses, and handles become objects.
//
// Handles are numbers, each given out once, looked up in a table: so NULL, a freed handle and one
// of another kind are told apart from a good one without touching memory that may be gone. The
// table and the text of each thread's last error are the only state of the library that is not in
// an object of the caller's: C has neither owners nor exceptions to hold them.
#pragma once

#include <exception>
#include <memory>
#include <string_view>
#include <utility>
#include <variant>

#include "cp/bindings/c_api.h"
#include "cp/context_parallel.h"
#include "cp/gpu_group.h"
#include "src/base/error.h"
#include "src/comm/ordered_sum.h"

namespace cpattn::c {

using Sum = std::variant<OrderedSum<float>, OrderedSum<double>>;

/// The ranks, and where their shards are.
struct Group {
  std::shared_ptr<Communicator> ranks;
  std::shared_ptr<GpuGroup> gpu;  ///< null: in host memory

  std::shared_ptr<ShardTransport> shards() const {
    if (gpu != nullptr) return gpu;
    return ranks;
  }
};

/// The object behind a kind of handle, and its name in messages.
template <class Handle>
struct HandleKind;
template <>
struct HandleKind<cpattn_group> {
  using Object = Group;
  static constexpr std::string_view kName = "group";
};
template <>
struct HandleKind<cpattn_attention> {
  using Object = ContextParallelAttention;
  static constexpr std::string_view kName = "attention";
};
template <>
struct HandleKind<cpattn_plan> {
  using Object = PlannedAttention;
  static constexpr std::string_view kName = "plan";
};
template <>
struct HandleKind<cpattn_sum> {
  using Object = Sum;
  static constexpr std::string_view kName = "sum";
};

void* add_handle(std::shared_ptr<void> object, std::string_view kind);
/// InvalidArgument, saying what is wrong with the handle.
std::shared_ptr<void> find_handle(const void* handle, std::string_view kind);
void remove_handle(const void* handle, std::string_view kind);

/// The object of a handle; it lives as long as the result, whoever frees the handle meanwhile.
template <class Handle>
std::shared_ptr<typename HandleKind<Handle>::Object> object_of(Handle* handle) {
  using Object = typename HandleKind<Handle>::Object;
  return std::static_pointer_cast<Object>(find_handle(handle, HandleKind<Handle>::kName));
}

template <class Handle>
void give(Handle** handle, std::shared_ptr<typename HandleKind<Handle>::Object> object) {
  *handle = static_cast<Handle*>(add_handle(std::move(object), HandleKind<Handle>::kName));
}

template <class Handle>
void take_back(Handle** handle) {
  if (handle == nullptr || *handle == nullptr) return;
  remove_handle(*handle, HandleKind<Handle>::kName);
  *handle = nullptr;
}

/// Keeps the text of the exception that is being handled, and names its kind.
cpattn_status status_of_exception() noexcept;

template <class Body>
cpattn_status guarded(const Body& body) noexcept {
  try {
    body();
    return CPATTN_OK;
  } catch (...) {
    return status_of_exception();
  }
}

/// Makes what a collective call needs, or refuses the call on all ranks when it cannot be made, be
/// it for want of memory: a rank that threw alone would leave the others waiting.
template <class Make, class Refuse>
auto made_or_refused(const Make& make, const Refuse& refuse) {
  try {
    return make();
  } catch (const std::exception& error) {
    refuse(error.what());
    throw;  // not reached: refusing throws
  }
}

}  // namespace cpattn::c
