// Worker: a thread with a queue, which is what a stream is made of, and a branch of a graph.
//
// Putting work in orders the host before the worker, never the worker before the host: only
// Signals that work sets do that (fake_signal.h says why it matters).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "kernels/cuda/host/executor.h"

namespace cpattn::fake_cuda {

class Worker {
 public:
  using Work = std::function<void()>;

  Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// What is queued is still done, by a thread that nobody waits for (see wait_for_workers).
  ~Worker();

  void push(Work work);
  /// Whether all that was pushed is done; if so, what it did comes before what the caller does
  /// next.
  bool is_idle() const;
  /// Returns when what was pushed so far is done.
  void wait() const;

  /// Runs kernels of the calling thread, which is a Worker's. Made when first needed and passed on
  /// to later Workers: what the thread sanitizer keeps of a fiber takes milliseconds to make.
  static cuda_host::Executor& executor();
  /// A pause drawn from the seed of set_delays; for the calling Worker, before each operation.
  static void delay();

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);

  std::shared_ptr<Queue> queue_;
};

/// Waits for the threads of Workers that are gone. Needed before a fork, and before leaving where
/// a sanitizer counts threads.
void wait_for_workers();

}  // namespace cpattn::fake_cuda
