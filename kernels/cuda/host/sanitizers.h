// What the sanitizers must be told about fibers, barriers and copies that no compiler instruments.
//
// Every function here does nothing unless the program is linked with that sanitizer's runtime: the
// declarations are weak. The host layer itself is always compiled without sanitizers, so that they
// judge the kernels and not the scheduler, whose sharing of memory between fibers is its trade.
#pragma once

#include <cstddef>

extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                          std::size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                           std::size_t* size);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* at, std::size_t size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* at, std::size_t size);
__attribute__((weak)) void* __asan_region_is_poisoned(void* at, std::size_t size);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* tag);
__attribute__((weak)) void __tsan_release(void* tag);
__attribute__((weak)) void __tsan_read_range(void* at, unsigned long size);
__attribute__((weak)) void __tsan_write_range(void* at, unsigned long size);
}

namespace cpattn::cuda_host {

inline bool is_checked_for_races() { return __tsan_create_fiber != nullptr; }

/// What came before a release of a tag happens before what follows a later acquire of it.
inline void race_release(void* tag) {
  if (__tsan_release != nullptr) __tsan_release(tag);
}
inline void race_acquire(void* tag) {
  if (__tsan_acquire != nullptr) __tsan_acquire(tag);
}

/// Accesses that a compiler does not instrument: a memcpy it expands in line, or our own. In line
/// so that a report shows the kernel's line on top.
__attribute__((always_inline)) inline void announce_read(const void* at, std::size_t size) {
  if (__tsan_read_range != nullptr && size > 0) __tsan_read_range(const_cast<void*>(at), size);
}
__attribute__((always_inline)) inline void announce_write(void* at, std::size_t size) {
  if (__tsan_write_range != nullptr && size > 0) __tsan_write_range(at, size);
}

inline void forbid_access(const void* at, std::size_t size) {
  if (__asan_poison_memory_region != nullptr) __asan_poison_memory_region(at, size);
}
inline void allow_access(const void* at, std::size_t size) {
  if (__asan_unpoison_memory_region != nullptr) __asan_unpoison_memory_region(at, size);
}
inline bool is_forbidden(const void* at, std::size_t size) {
  return __asan_region_is_poisoned != nullptr &&
         __asan_region_is_poisoned(const_cast<void*>(at), size) != nullptr;
}

}  // namespace cpattn::cuda_host
