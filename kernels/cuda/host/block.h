// The threads of one block as fibers: who runs next, who waits for what. Not for kernels.
//
// Nothing that runs on a fiber here may use a template or inline function that a test could use as
// well, or memory functions: the linker would be free to take the test's copy, compiled for a
// sanitizer, which would then judge the scheduler. Plain arrays and lists, therefore.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/host/async_copies.h"
#include "kernels/cuda/host/executor.h"
#include "kernels/cuda/host/fiber.h"
#include "kernels/cuda/host/thread.h"
#include "kernels/cuda/host/tile_copies.h"
#include "kernels/cuda/host/wgmma.h"

namespace cpattn::cuda_host {

enum class ThreadState : unsigned char { ready, waiting, done };

struct DeviceThread : Thread {
  std::unique_ptr<Fiber> fiber;
  ThreadState state = ThreadState::ready;
  const char* waits_at = nullptr;
  std::uint64_t wait_detail = 0;  ///< a mask, a count, an address: for the report
  const void* wait_key = nullptr;
  DeviceThread* next_waiting = nullptr;  ///< in a barrier's list
  std::vector<AsyncCopy> copies;         ///< started and not waited for, oldest first
  std::size_t first_copy = 0;            ///< in copies: those before it have been waited for
  unsigned copy_group = 0;               ///< the one that the next copy belongs to
  std::vector<Product> products;         ///< likewise, of tensor-core products
  unsigned product_group = 0;
  bool is_fenced = false;  ///< wgmma.fence since the last group of products was closed
};

struct Barrier {
  unsigned expected = 0;  ///< 0: all that have not exited
  unsigned arrived = 0;
  unsigned phase = 0;
  DeviceThread* waiting = nullptr;
  char tags[2];  ///< for the thread sanitizer, one for each parity of the phase
};

/// Lanes of one mask on their way to one operation.
struct Meeting {
  const struct WarpOperation* operation = nullptr;
  unsigned mask = 0;
  unsigned arrived = 0;
  void* operand[kWarpLanes];
};

struct Warp {
  static constexpr int kMeetings = 4;  ///< masks that can be pending at once
  Meeting meetings[kMeetings];
  unsigned exited = 0;  ///< lanes; those beyond the block's last thread from the start
  char tag = 0;         ///< for the thread sanitizer: __syncwarp of any mask
};

struct Warpgroup {
  const struct WarpgroupOperation* operation = nullptr;
  unsigned arrived = 0;
  void* operand[kWarpgroupThreads];
};

/// xorshift64*: not std::mt19937, see above.
struct Random {
  std::uint64_t state = 1;
  void seed(std::uint64_t value) { state = 0x9e3779b97f4a7c15ull * (2 * value + 1); }
  std::uint32_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<std::uint32_t>(state * 0x2545f4914f6cdd1dull >> 32);
  }
};

class Block {
 public:
  static constexpr unsigned kBarriers = 16;

  /// Threads that stand at the kernel's beginning.
  void prepare(const LaunchShape& shape, Index3 block_index, const Options& options,
               Counters* counters, const std::function<void()>* thread);
  /// Runs all threads to their end. Throws InternalError where they do not get there.
  void run(Fiber& launcher);
  /// After the last block of a launch (run does it when it throws): what the threads did comes
  /// before what the caller does. Suspended threads are dropped: device code owns nothing.
  void end_launch(const Fiber& launcher);

  // For the operations, on a fiber.
  DeviceThread& self() const { return static_cast<DeviceThread&>(*current_thread); }
  DeviceThread& thread(unsigned number) { return threads_[number]; }
  unsigned num_threads() const { return num_threads_; }
  unsigned num_alive() const { return num_alive_; }
  Warp& warp(unsigned number) { return warps_[number]; }
  Warpgroup& warpgroup(unsigned number) { return warpgroups_[number]; }
  Barrier& barrier(unsigned id) { return barriers_[id]; }
  const Options& options() const { return options_; }
  Counters& counters() { return *counters_; }
  SharedMemory& shared() { return shared_; }
  std::vector<TileCopy>& tile_copies() { return tile_copies_; }

  void make_ready(DeviceThread& thread);
  /// Suspends the calling thread until make_ready.
  void wait(const char* what, std::uint64_t detail, const void* key = nullptr);
  /// make_ready for all that wait with this key.
  void wake(const void* key);
  void open(Barrier& barrier);
  void yield();

 private:
  static void thread_main();
  void leave(DeviceThread& thread);
  DeviceThread* next_ready();
  void switch_to_next(bool is_last);
  std::string stuck() const;

  std::vector<DeviceThread> threads_;
  unsigned num_threads_ = 0;
  unsigned num_alive_ = 0;
  std::vector<Warp> warps_;
  std::vector<Warpgroup> warpgroups_;
  Barrier barriers_[kBarriers];
  std::vector<unsigned> ready_;  ///< circular
  unsigned first_ready_ = 0;
  unsigned num_ready_ = 0;
  std::uint64_t idle_yields_ = 0;
  Random random_;
  Options options_;
  Counters* counters_ = nullptr;
  SharedMemory shared_;
  std::vector<TileCopy> tile_copies_;  ///< that have not landed
  Fiber* launcher_ = nullptr;
  const std::function<void()>* thread_body_ = nullptr;
  std::string failure_;
  char begin_tag_ = 0, end_tag_ = 0;
};

}  // namespace cpattn::cuda_host
