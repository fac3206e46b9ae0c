#include "src/device/cuda_driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cpattn {
namespace {

// The driver's interface is binary and does not change; its header may not be there.
using PointerQuery = int (*)(void* value, int attribute, std::uintptr_t address);
constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kPointerQuery = "cuPointerGetAttribute";
constexpr int kSuccess = 0;
constexpr int kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9;  // CU_POINTER_ATTRIBUTE_...
constexpr unsigned kDeviceMemory = 2;                               // CU_MEMORYTYPE_DEVICE

/// How many libraries this process has loaded so far.
std::uint64_t num_loads() {
  std::uint64_t loads = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<std::uint64_t*>(result) = info->dlpi_adds;
        return 1;  // the first one knows
      },
      &loads);
  return loads;
}

/// Null in a process that has not loaded the driver. Looking for it takes memory for the answer
/// "no", so that is done again only after another library has been loaded.
PointerQuery pointer_query() {
  static std::atomic<PointerQuery> known{nullptr};
  static std::atomic<std::uint64_t> absent_at{0};
  if (const PointerQuery query = known) return query;
  const std::uint64_t loads = num_loads();
  if (absent_at == loads) return nullptr;
  void* const driver = ::dlopen(kDriver, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (driver == nullptr) {
    ::dlerror();
    absent_at = loads;
    return nullptr;
  }
  // Kept open: what was loaded by somebody else must not go while we call it.
  known = reinterpret_cast<PointerQuery>(::dlsym(driver, kPointerQuery));
  return known;
}

}  // namespace

int gpu_of_address(const void* address) noexcept {
  const PointerQuery query = pointer_query();
  if (query == nullptr) return -1;
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  unsigned type = 0, is_managed = 0;
  int ordinal = -1;
  if (query(&type, kMemoryType, value) != kSuccess || type != kDeviceMemory) return -1;
  if (query(&is_managed, kIsManaged, value) == kSuccess && is_managed != 0) return -1;
  return query(&ordinal, kDeviceOrdinal, value) == kSuccess ? ordinal : -1;
}

}  // namespace cpattn
