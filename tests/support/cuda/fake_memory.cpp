#include "tests/support/cuda/fake_memory.h"

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/support/cuda/fake_state.h"

namespace cpattn::fake_cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kNotANumber = 0xFF;

struct Allocations {
  std::mutex mutex;
  std::map<const std::byte*, Allocation> by_begin;
};
Allocations& allocations() {
  static auto* const only = new Allocations;
  return *only;
}

std::array<std::atomic<std::int64_t>, kMaxDevices> used{};

Counts::Count& count_of(MemoryKind kind) {
  return kind == MemoryKind::device ? counts().device_allocations : counts().host_allocations;
}

bool remember(const Allocation& allocation) {
  const std::lock_guard lock(allocations().mutex);
  auto& by_begin = allocations().by_begin;
  const auto next = by_begin.upper_bound(allocation.begin);
  const bool meets_next =
      next != by_begin.end() && next->first < allocation.begin + allocation.bytes;
  const bool meets_previous =
      next != by_begin.begin() &&
      std::prev(next)->second.begin + std::prev(next)->second.bytes > allocation.begin;
  if (meets_next || meets_previous) return false;
  by_begin.emplace(allocation.begin, allocation);
  add(count_of(allocation.kind), 1);
  return true;
}

}  // namespace

void* allocate(std::size_t bytes, MemoryKind kind, int device, bool is_of_pool) {
  if (kind == MemoryKind::device && used_bytes(device) + static_cast<std::int64_t>(bytes) >
                                        static_cast<std::int64_t>(machine().memory_bytes)) {
    return nullptr;
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes) != 0) return nullptr;
  if (!is_of_pool) fill_with_nan(memory, bytes);
  if (kind == MemoryKind::device) add_used_bytes(device, static_cast<std::int64_t>(bytes));
  remember({static_cast<std::byte*>(memory), bytes, kind, device, is_of_pool});
  return memory;
}

void fill_with_nan(void* memory, std::size_t bytes) { std::memset(memory, kNotANumber, bytes); }

bool register_memory(void* memory, std::size_t bytes, int device) {
  return remember({static_cast<std::byte*>(memory), bytes, MemoryKind::registered, device});
}

std::optional<Allocation> forget(void* memory, MemoryKind kind) {
  const std::lock_guard lock(allocations().mutex);
  auto& by_begin = allocations().by_begin;
  const auto found = by_begin.find(static_cast<std::byte*>(memory));
  if (found == by_begin.end() || found->second.kind != kind) return std::nullopt;
  const Allocation allocation = found->second;
  by_begin.erase(found);
  add(count_of(kind), -1);
  return allocation;
}

std::optional<Allocation> find_allocation(const void* address) {
  const auto* place = static_cast<const std::byte*>(address);
  const std::lock_guard lock(allocations().mutex);
  const auto& by_begin = allocations().by_begin;
  auto next = by_begin.upper_bound(place);
  if (next == by_begin.begin()) return std::nullopt;
  const Allocation& candidate = std::prev(next)->second;
  if (place >= candidate.begin + candidate.bytes) return std::nullopt;
  return candidate;
}

std::int64_t used_bytes(int device) {
  return used[static_cast<std::size_t>(device)].load(std::memory_order_relaxed);
}

void add_used_bytes(int device, std::int64_t bytes) {
  used[static_cast<std::size_t>(device)].fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace cpattn::fake_cuda
