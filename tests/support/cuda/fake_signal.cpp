#include "tests/support/cuda/fake_signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace cpattn::fake_cuda {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

}  // namespace

void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
  futex(word, FUTEX_WAIT_PRIVATE, seen, nullptr);
}

void wake_all(const std::atomic<std::uint32_t>& word) {
  futex(word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
}

void sleep_while_shared(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                        unsigned limit_ms) {
  const timespec limit{limit_ms / 1000, static_cast<long>(limit_ms % 1000) * 1000 * 1000};
  futex(word, FUTEX_WAIT, seen, &limit);
}

void wake_all_shared(const std::atomic<std::uint32_t>& word) {
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace cpattn::fake_cuda
