#include "tests/support/cuda/fake_worker.h"

#include <chrono>
#include <list>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/cuda/fake_cuda.h"
#include "tests/support/cuda/fake_signal.h"

namespace cpattn::fake_cuda {
namespace {

using cuda_host::Executor;

struct Delays {
  std::atomic<std::uint64_t> seed{0};
  std::atomic<unsigned> limit_us{0};
};
Delays delays;
std::atomic<std::uint64_t> num_workers{0};

/// Executors that no thread uses at present.
struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Executor>> idle;

  std::unique_ptr<Executor> take() {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return std::make_unique<Executor>();
    std::unique_ptr<Executor> executor = std::move(idle.back());
    idle.pop_back();
    return executor;
  }
  void give(std::unique_ptr<Executor> executor) {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(executor));
  }
};
Pool& pool() {
  static Pool* const only = new Pool;  // outlives every thread
  return *only;
}

/// What the calling Worker's thread owns.
struct Own {
  std::unique_ptr<Executor> executor;
  std::minstd_rand random;
  std::uint64_t seed = 0;
  std::uint64_t number = 0;
  ~Own() {
    if (executor != nullptr) pool().give(std::move(executor));
  }
};
thread_local Own own;

/// Threads of Workers that are gone, with the means to tell that they have ended.
struct Retired {
  std::mutex mutex;
  std::vector<std::thread> threads;
  ~Retired() {
    for (std::thread& thread : threads) thread.detach();
  }
};
Retired retired;

}  // namespace

/// A list to which any thread appends and from which one takes (Vyukov's): the taker writes nothing
/// that an appender reads.
struct Worker::Queue {
  struct Item {
    Work work;
    std::atomic<Item*> next{nullptr};
  };

  std::atomic<Item*> newest{new Item};
  Item* oldest = newest.load(std::memory_order_relaxed);  ///< done already; the taker's
  std::atomic<std::uint32_t> num_pushed{0};
  std::atomic<std::uint32_t> num_done{0};
  std::atomic<bool> is_closed{false};
  std::thread thread;

  ~Queue() { delete oldest; }

  void push(Work work) {
    auto* item = new Item{std::move(work)};
    Item* before = newest.exchange(item, std::memory_order_acq_rel);
    before->next.store(item, std::memory_order_release);
    num_pushed.fetch_add(1, std::memory_order_release);
    wake_all(num_pushed);
  }
  /// Null when there is nothing.
  Item* take() {
    Item* next = oldest->next.load(std::memory_order_acquire);
    if (next == nullptr) return nullptr;
    delete oldest;
    oldest = next;
    return next;
  }
};

Worker::Worker() : queue_(std::make_shared<Queue>()) {
  queue_->thread = std::thread([queue = queue_] { run(queue); });
}

Worker::~Worker() {
  std::thread thread = std::move(queue_->thread);
  queue_->push([queue = queue_.get()] { queue->is_closed.store(true, std::memory_order_relaxed); });
  const std::lock_guard lock(retired.mutex);
  retired.threads.push_back(std::move(thread));
}

void Worker::run(const std::shared_ptr<Queue>& queue) {
  own.number = num_workers.fetch_add(1, std::memory_order_relaxed);
  while (!queue->is_closed.load(std::memory_order_relaxed)) {
    const std::uint32_t seen = queue->num_pushed.load(std::memory_order_acquire);
    if (Queue::Item* item = queue->take()) {
      item->work();
      item->work = nullptr;
      queue->num_done.fetch_add(1, std::memory_order_release);
      wake_all(queue->num_done);
    } else {
      sleep_while(queue->num_pushed, seen);
    }
  }
}

void Worker::push(Work work) { queue_->push(std::move(work)); }

bool Worker::is_idle() const {
  return queue_->num_done.load(std::memory_order_relaxed) ==
             queue_->num_pushed.load(std::memory_order_relaxed) &&
         queue_->num_done.load(std::memory_order_acquire) ==
             queue_->num_pushed.load(std::memory_order_relaxed);
}

void Worker::wait() const {
  const std::uint32_t target = queue_->num_pushed.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint32_t done = queue_->num_done.load(std::memory_order_relaxed);
    if (static_cast<std::int32_t>(target - done) <= 0) break;
    sleep_while(queue_->num_done, done);
  }
  queue_->num_done.load(std::memory_order_acquire);
}

Executor& Worker::executor() {
  if (own.executor == nullptr) own.executor = pool().take();
  return *own.executor;
}

void Worker::delay() {
  const unsigned limit_us = delays.limit_us.load(std::memory_order_relaxed);
  if (limit_us == 0) return;
  const std::uint64_t seed = delays.seed.load(std::memory_order_relaxed);
  if (seed != own.seed) {
    own.seed = seed;
    own.random.seed(static_cast<std::minstd_rand::result_type>(seed * 1009 + own.number + 1));
  }
  // Half of the operations follow at once, so that both orders of two neighbours occur.
  const unsigned drawn = static_cast<unsigned>(own.random() >> 4) % (2 * limit_us);
  if (drawn < limit_us) std::this_thread::sleep_for(std::chrono::microseconds(drawn));
}

void set_delays(std::uint64_t seed, unsigned limit_us) {
  delays.seed.store(seed, std::memory_order_relaxed);
  delays.limit_us.store(limit_us, std::memory_order_relaxed);
}

void wait_for_workers() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(retired.mutex);
    threads.swap(retired.threads);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cpattn::fake_cuda
