// What memory there is and of which kind. Hosts only: no stream comes here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "tests/support/cuda/fake_cuda.h"

namespace cpattn::fake_cuda {

enum class MemoryKind { device, pinned, registered };

struct Allocation {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::device;
  int device = 0;
  bool is_of_pool = false;  ///< other devices do not see it
};

/// Memory of its own, with whatever the address sanitizer puts around it, aligned as a device's.
/// Null where there is none. Filled with NaN; memory of a pool is by whoever asks for it.
void* allocate(std::size_t bytes, MemoryKind kind, int device, bool is_of_pool);
/// NaN in every format.
void fill_with_nan(void* memory, std::size_t bytes);
/// Memory that the caller has.
bool register_memory(void* memory, std::size_t bytes, int device);
/// Forgets an allocation that begins there, if it is of the kind; who called frees it.
std::optional<Allocation> forget(void* memory, MemoryKind kind);
/// The allocation that this address is in.
std::optional<Allocation> find_allocation(const void* address);

/// Bytes of a device that are taken; streams give back, so it is a count and not a list.
std::int64_t used_bytes(int device);
void add_used_bytes(int device, std::int64_t bytes);

}  // namespace cpattn::fake_cuda
