// Fiber: a call chain with a stack of its own that gives the processor away by name.
//
// A switch saves what a function must preserve and exchanges stack pointers: a dozen instructions,
// about 10 ns. ucontext does the same with two system calls, about 100 times slower. A fiber stays
// in the operating-system thread that runs it first.
#pragma once

#include <cstddef>

namespace cpattn::cuda_host {

class Fiber {
 public:
  /// The calling thread's own stack.
  Fiber() = default;
  /// A stack of stack_bytes with a guard page below it, so that an overflow faults. Fibers whose
  /// hot frames lie at equal page offsets evict one another from the first-level cache (a switch
  /// then costs four times as much): `number` staggers them.
  Fiber(std::size_t stack_bytes, unsigned number);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// The next switch to this fiber calls `entry`, which must call begin_fiber() first and must not
  /// return. What the fiber was doing before is dropped: no destructor runs.
  void start(void (*entry)());

  /// Takes the identity of the calling thread (for a fiber without a stack of its own).
  void adopt_thread();

  /// Goes on in `to`; returns when somebody switches back. `is_last`: nobody will.
  static void switch_between(Fiber& from, Fiber& to, bool is_last);
  /// To the thread sanitizer: what this fiber has done so far comes before later acquires of `tag`.
  /// For a fiber that will not run again; `caller` is the one that calls.
  void release_as(const Fiber& caller, void* tag) const;

  /// First thing on a new fiber; `launcher` is the fiber without a stack of its own that all
  /// others go back to.
  static void begin_fiber(Fiber& launcher);

 private:
  bool owns_stack_ = false;
  std::byte* stack_ = nullptr;  ///< lowest usable byte
  std::size_t stack_bytes_ = 0;
  std::size_t stagger_ = 0;
  void* stack_pointer_ = nullptr;
  void* race_identity_ = nullptr;  ///< of the thread sanitizer
  void* fake_stack_ = nullptr;     ///< of the address sanitizer, while switched out
};

}  // namespace cpattn::cuda_host
