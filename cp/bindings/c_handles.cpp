#include "cp/bindings/c_handles.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "src/base/error.h"

namespace cpattn::c {
namespace {

class HandleTable {
 public:
  void* add(std::shared_ptr<void> object, std::string_view kind) {
    const std::lock_guard lock(mutex_);
    entries_.emplace(next_, Entry{std::move(object), kind});
    return reinterpret_cast<void*>(next_++);
  }

  std::shared_ptr<void> find(const void* handle, std::string_view kind) {
    const std::lock_guard lock(mutex_);
    return entry(handle, kind)->second.object;
  }

  void remove(const void* handle, std::string_view kind) {
    std::shared_ptr<void> object;  // destroyed after the lock is: that may take a while
    const std::lock_guard lock(mutex_);
    const auto found = entry(handle, kind);
    object = std::move(found->second.object);
    entries_.erase(found);
  }

 private:
  struct Entry {
    std::shared_ptr<void> object;
    std::string_view kind;
  };
  using Entries = std::map<std::uintptr_t, Entry>;

  Entries::iterator entry(const void* handle, std::string_view kind) {
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    require(number != 0, kind, ": NULL, expected a handle");
    const auto found = entries_.find(number);
    require(found != entries_.end(), kind, ": ",
            number < next_ ? "this handle was freed" : "not a handle");
    require(found->second.kind == kind, kind, ": this handle is of kind ", found->second.kind,
            ", expected ", kind);
    return found;
  }

  std::mutex mutex_;
  Entries entries_;
  std::uintptr_t next_ = 1;
};

/// Never destroyed: a program may end without freeing its handles, after MPI has gone.
HandleTable& table() {
  static auto* const handles = new HandleTable;
  return *handles;
}

std::string& last_error() {
  thread_local std::string text;
  return text;
}

cpattn_status failed(cpattn_status status, const char* text) noexcept {
  try {
    last_error() = text;
  } catch (...) {  // no memory for the text: the status has to do
    last_error().clear();
  }
  return status;
}

}  // namespace

void* add_handle(std::shared_ptr<void> object, std::string_view kind) {
  return table().add(std::move(object), kind);
}

std::shared_ptr<void> find_handle(const void* handle, std::string_view kind) {
  return table().find(handle, kind);
}

void remove_handle(const void* handle, std::string_view kind) { table().remove(handle, kind); }

cpattn_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return failed(CPATTN_INVALID_ARGUMENT, error.what());
  } catch (const Unsupported& error) {
    return failed(CPATTN_UNSUPPORTED, error.what());
  } catch (const CommError& error) {
    return failed(CPATTN_COMM_ERROR, error.what());
  } catch (const DeviceError& error) {
    return failed(CPATTN_DEVICE_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return failed(CPATTN_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(CPATTN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(CPATTN_INTERNAL_ERROR, "unknown exception");
  }
}

}  // namespace cpattn::c

const char* cpattn_last_error(void) { return cpattn::c::last_error().c_str(); }
