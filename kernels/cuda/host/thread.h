// What the words of device code ask about the CUDA thread that is running, and how it waits.
#pragma once

#include "kernels/cuda/host/shared_memory.h"
#include "kernels/cuda/host/stream.h"
#include "src/base/error.h"

namespace cpattn::cuda_host {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kWarpgroupThreads = 128;
inline constexpr unsigned kAllLanes = 0xffffffffu;

class Block;

struct Thread {
  Index3 thread_index;
  Index3 block_index;
  Index3 block_dim;
  Index3 grid_dim;
  unsigned number = 0;  ///< within the block, x fastest
  unsigned lane = 0;
  unsigned warp = 0;
  Block* block = nullptr;
};

/// Null outside of kernels.
extern constinit thread_local Thread* current_thread;

/// Ends the kernel: launch() throws InternalError with this text and where it happened.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw InternalError(detail::concat(parts...));
}

SharedAddress shared_address(const void* place);
/// The place of `size` bytes at an address; fails where they are misaligned or not all inside.
std::byte* shared_place(SharedAddress address, std::size_t size, std::size_t alignment);
std::byte* shared_begin();

/// Barrier `id` for `count` threads; count 0: all threads of the block that have not exited.
/// Memory accesses before it happen before those after it.
void barrier_sync(unsigned id, unsigned count, const char* name);
/// Counts for the barrier without waiting.
void barrier_arrive(unsigned id, unsigned count);

/// Lets others run; for loops that wait for what another thread writes. Fails when for a long time
/// no thread of the block has done anything else.
void yield();

}  // namespace cpattn::cuda_host
