// cp.async on the host: when a thread's copies to shared memory land.
//
// The bytes move in the kernel's own translation unit, so that the sanitizers see the accesses.
#pragma once

#include <cstdint>

#include "kernels/cuda/host/thread.h"

namespace cpattn::cuda_host {

struct alignas(16) [[gnu::may_alias]] Bytes16 {
  std::uint32_t word[4];
};

struct AsyncCopy {
  Bytes16* to = nullptr;
  const Bytes16* from = nullptr;  ///< null: zeros
  unsigned group = 0;
};

/// Remembers a copy of the calling thread. Whether it lands at once.
bool start_copy(Bytes16* to, const Bytes16* from);
void commit_copies();
/// The next copy to land so that all groups but the newest `num_newest` are complete; null when
/// they are. Copies that landed at their start are not among them.
const AsyncCopy* next_copy(unsigned num_newest);

inline void land(const AsyncCopy& copy) {
  for (int i = 0; i < 4; ++i) copy.to->word[i] = copy.from != nullptr ? copy.from->word[i] : 0;
}

inline void copy_async16(SharedAddress to, const void* from, bool is_valid) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    fail("cp.async: the global address is not a multiple of 16");
  }
  auto* place = reinterpret_cast<Bytes16*>(shared_place(to, 16, 16));
  const auto* source = is_valid ? static_cast<const Bytes16*>(from) : nullptr;
  if (start_copy(place, source)) {
    land({place, source});
  } else {
    for (std::uint32_t& word : place->word) word = 0xffffffffu;
  }
}

inline void wait_copies(unsigned num_newest) {
  while (const AsyncCopy* copy = next_copy(num_newest)) land(*copy);
}

struct DeviceThread;
/// Fails when the thread has copies that it never waited for. For Block.
void check_copies_done(const DeviceThread& thread);

}  // namespace cpattn::cuda_host
