// Deals the units of a step, (task, kv head) pairs, to threads in list order, and lets one begin
// when the earlier ones of the same q chunk, and those of the same kv block, are done.
//
// Units are handed out in order and a thread finishes one before it asks for the next, so the
// oldest unfinished unit never waits: no deadlock, for any number of threads. Lives in memory of
// the caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>

#include "kernels/block_gradient.h"

namespace cpattn::cpu {

class UnitQueue {
 public:
  struct Unit {
    std::int64_t task = 0;
    std::int64_t kv_head = 0;
    std::int64_t of_q_chunk = 0;   ///< how many of the same q chunk and kv head come before it
    std::int64_t of_kv_block = 0;  ///< likewise of the kv block
  };

  static std::size_t bytes(std::int64_t q_blocks, std::int64_t kv_blocks, std::int64_t kv_heads) {
    return static_cast<std::size_t>((q_blocks + kv_blocks) * kv_heads) * sizeof(Progress);
  }

  /// `memory`: bytes() of it, 64-byte aligned, for as long as this lives.
  UnitQueue(std::span<const GradientTask> tasks, std::int64_t q_blocks, std::int64_t kv_blocks,
            std::int64_t kv_heads, std::byte* memory)
      : tasks_(tasks),
        kv_heads_(kv_heads),
        of_q_chunk_(reinterpret_cast<Progress*>(memory)),
        of_kv_block_(of_q_chunk_ + q_blocks * kv_heads) {
    std::uninitialized_default_construct_n(of_q_chunk_, (q_blocks + kv_blocks) * kv_heads);
  }

  /// Whether there was one left.
  bool take(Unit& unit) {
    while (lock_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    const bool is_left = next_ < static_cast<std::int64_t>(tasks_.size()) * kv_heads_;
    if (is_left) {
      unit.task = next_ / kv_heads_;
      unit.kv_head = next_ % kv_heads_;
      unit.of_q_chunk = q_chunk_of(unit).taken++;
      unit.of_kv_block = kv_block_of(unit).taken++;
      ++next_;
    }
    lock_.clear(std::memory_order_release);
    return is_left;
  }

  /// Returns when the unit may begin; calls `wait` over and over until then.
  template <class Wait>
  void await(const Unit& unit, const Wait& wait) {
    const auto is_behind = [](const Progress& progress, std::int64_t turn) {
      return progress.done.load(std::memory_order_acquire) < turn;
    };
    while (is_behind(q_chunk_of(unit), unit.of_q_chunk) ||
           is_behind(kv_block_of(unit), unit.of_kv_block)) {
      wait();
      std::this_thread::yield();
    }
  }

  void finish(const Unit& unit) {
    q_chunk_of(unit).done.fetch_add(1, std::memory_order_release);
    kv_block_of(unit).done.fetch_add(1, std::memory_order_release);
  }

 private:
  struct Progress {
    std::int64_t taken = 0;  ///< under lock_
    std::atomic<std::int64_t> done = 0;
  };

  Progress& q_chunk_of(const Unit& unit) const {
    return of_q_chunk_[task_of(unit).q_chunk * kv_heads_ + unit.kv_head];
  }
  Progress& kv_block_of(const Unit& unit) const {
    return of_kv_block_[task_of(unit).kv_block * kv_heads_ + unit.kv_head];
  }
  const GradientTask& task_of(const Unit& unit) const {
    return tasks_[static_cast<std::size_t>(unit.task)];
  }

  std::span<const GradientTask> tasks_;
  std::int64_t kv_heads_;
  Progress* of_q_chunk_;
  Progress* of_kv_block_;
  std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
  std::int64_t next_ = 0;
};

}  // namespace cpattn::cpu
