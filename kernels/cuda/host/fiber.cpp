#include "kernels/cuda/host/fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "kernels/cuda/host/sanitizers.h"
#include "src/base/error.h"

// Pushes what the calling convention lets a caller keep, stores the stack pointer in *save, and
// does the opposite from `to`.
extern "C" void cpattn_switch_stack(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl cpattn_switch_stack
.type cpattn_switch_stack,@function
cpattn_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cpattn_switch_stack,.-cpattn_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl cpattn_switch_stack
.type cpattn_switch_stack,%function
cpattn_switch_stack:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size cpattn_switch_stack,.-cpattn_switch_stack
)");
#else
#error "executing CUDA kernels on this processor needs its stack switch written here"
#endif

namespace cpattn::cuda_host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr unsigned kNoImpliedOrder = 1;  // flag of __tsan_switch_to_fiber

}  // namespace

Fiber::Fiber(std::size_t stack_bytes, unsigned number)
    // 320 bytes: five lines further down for each, over two pages.
    : stack_bytes_(stack_bytes), stagger_(number * 320 % (2 * kPage)) {
  void* memory = mmap(nullptr, stack_bytes + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require<Unsupported>(memory != MAP_FAILED, "no memory for a stack of ", stack_bytes, " bytes");
  mprotect(memory, kPage, PROT_NONE);
  stack_ = static_cast<std::byte*>(memory) + kPage;
  owns_stack_ = true;
  if (__tsan_create_fiber != nullptr) race_identity_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (!owns_stack_) return;
  if (__tsan_destroy_fiber != nullptr) __tsan_destroy_fiber(race_identity_);
  munmap(stack_ - kPage, stack_bytes_ + kPage);
}

void Fiber::start(void (*entry)()) {
  allow_access(stack_, stack_bytes_);
  fake_stack_ = nullptr;
  auto* top = reinterpret_cast<void**>(stack_ + stack_bytes_ - stagger_);
#if defined(__x86_64__)
  constexpr int kSaved = 6;
  *--top = nullptr;  // where entry's return address would be: aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
#else
  constexpr int kSaved = 20;
#endif
  for (int i = 0; i < kSaved; ++i) *--top = nullptr;
#if defined(__aarch64__)
  top[1] = reinterpret_cast<void*>(entry);  // x30
#endif
  stack_pointer_ = top;
}

void Fiber::adopt_thread() {
  stack_ = nullptr;
  stack_bytes_ = 0;
  if (__tsan_get_current_fiber != nullptr) race_identity_ = __tsan_get_current_fiber();
}

void Fiber::switch_between(Fiber& from, Fiber& to, bool is_last) {
  if (__tsan_switch_to_fiber != nullptr) {
    __tsan_switch_to_fiber(to.race_identity_, kNoImpliedOrder);
  }
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(is_last ? nullptr : &from.fake_stack_, to.stack_,
                                   to.stack_bytes_);
  }
  cpattn_switch_stack(&from.stack_pointer_, to.stack_pointer_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
  }
}

void Fiber::release_as(const Fiber& caller, void* tag) const {
  if (__tsan_switch_to_fiber == nullptr) return;
  __tsan_switch_to_fiber(race_identity_, kNoImpliedOrder);
  race_release(tag);
  __tsan_switch_to_fiber(caller.race_identity_, kNoImpliedOrder);
}

void Fiber::begin_fiber(Fiber& launcher) {
  if (__sanitizer_finish_switch_fiber == nullptr) return;
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  // Only the first fiber to begin comes from the launcher: the bounds of its stack, which nothing
  // else tells.
  if (launcher.stack_bytes_ == 0) {
    launcher.stack_ = static_cast<std::byte*>(const_cast<void*>(bottom));
    launcher.stack_bytes_ = size;
  }
}

}  // namespace cpattn::cuda_host
