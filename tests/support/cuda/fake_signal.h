// Signals from one thread to others that order in one direction only: what the signaller did comes
// before what the waiter does next, and nothing else is ordered.
//
// A mutex with a condition, a semaphore or std::atomic::wait would also order the other way round
// (the waiter's past before the signaller's future), and so hide from the thread sanitizer the
// missing event wait that a test is looking for. Hence the operating system's futex and no more.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace cpattn::fake_cuda {

/// Sleeps while `word` holds `seen`; may also return for no reason.
void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t seen);
/// Wakes all that sleep on `word`.
void wake_all(const std::atomic<std::uint32_t>& word);

/// The same between processes that share the word, with a limit on the sleep.
void sleep_while_shared(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                        unsigned limit_ms);
void wake_all_shared(const std::atomic<std::uint32_t>& word);

/// Set once.
class Signal {
 public:
  void set() {
    state_.store(1, std::memory_order_release);
    wake_all(state_);
  }
  /// Orders only when the answer is yes.
  bool is_set() const {
    return state_.load(std::memory_order_relaxed) != 0 &&
           state_.load(std::memory_order_acquire) != 0;
  }
  void wait() const {
    while (!is_set()) sleep_while(state_, 0);
  }

 private:
  std::atomic<std::uint32_t> state_{0};
};

/// Counts its owners. Taking a share orders nothing (std::shared_ptr's does, both ways).
class Shared {
 public:
  Shared() = default;
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  virtual ~Shared() = default;

  void retain() const { owners_.fetch_add(1, std::memory_order_relaxed); }
  void release() const {
    if (owners_.fetch_sub(1, std::memory_order_release) != 1) return;
    owners_.load(std::memory_order_acquire);
    delete this;
  }

 private:
  mutable std::atomic<std::uint32_t> owners_{0};
};

/// A share of a Shared.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {
    if (object_ != nullptr) object_->retain();
  }
  Ref(const Ref& other) : Ref(other.object_) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) object_->release();
  }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

}  // namespace cpattn::fake_cuda
