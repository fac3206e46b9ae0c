#include "kernels/cuda/host/block.h"

#include <exception>

#include "kernels/cuda/host/sanitizers.h"
#include "kernels/cuda/host/warp.h"
#include "src/base/integers.h"

namespace cpattn::cuda_host {

constinit thread_local Thread* current_thread = nullptr;

void Block::prepare(const LaunchShape& shape, Index3 block_index, const Options& options,
                    Counters* counters, const std::function<void()>* thread) {
  const Index3 dim = shape.block;
  if (options.stack_bytes != options_.stack_bytes) threads_.clear();
  options_ = options;
  counters_ = counters;
  thread_body_ = thread;
  num_threads_ = num_alive_ = dim.x * dim.y * dim.z;
  if (threads_.size() < num_threads_) threads_.resize(num_threads_);
  warps_.assign(ceil_div(num_threads_, kWarpLanes), {});
  if (num_threads_ % kWarpLanes != 0) {
    warps_.back().exited = kAllLanes << num_threads_ % kWarpLanes;
  }
  warpgroups_.assign(ceil_div(num_threads_, kWarpgroupThreads), {});
  for (Barrier& barrier : barriers_) barrier = {};
  ready_.assign(num_threads_, 0);
  first_ready_ = num_ready_ = 0;
  idle_yields_ = 0;
  const std::uint64_t number =
      (std::uint64_t{block_index.z} * shape.grid.y + block_index.y) * shape.grid.x + block_index.x;
  random_.seed(options.seed + (number << 32));
  failure_.clear();
  shared_.prepare(shape.shared_bytes);
  tile_copies_.clear();
  tile_copies_.reserve(kMaxTileCopies);
  ++counters->blocks;
  for (unsigned i = 0; i < num_threads_; ++i) {
    DeviceThread& it = threads_[i];
    it.thread_index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    it.block_index = block_index;
    it.block_dim = dim;
    it.grid_dim = shape.grid;
    it.number = i;
    it.lane = i % kWarpLanes;
    it.warp = i / kWarpLanes;
    it.block = this;
    it.copies.clear();
    it.first_copy = 0;
    it.copy_group = 0;
    it.products.clear();
    it.product_group = 0;
    it.is_fenced = false;
    if (it.fiber == nullptr) it.fiber = std::make_unique<Fiber>(options.stack_bytes, i);
    it.fiber->start(thread_main);
    make_ready(it);
  }
}

void Block::run(Fiber& launcher) {
  launcher_ = &launcher;
  race_release(&begin_tag_);
  DeviceThread* first = next_ready();
  current_thread = first;
  Fiber::switch_between(launcher, *first->fiber, false);
  const Index3 at = threads_[0].block_index;
  current_thread = nullptr;
  if (failure_.empty() && num_alive_ > 0) failure_ = stuck();
  if (failure_.empty() && shared_.is_overrun()) {
    failure_ =
        detail::concat("a write behind the ", shared_.size_bytes(), " bytes of shared memory");
  }
  if (failure_.empty()) return;
  end_launch(launcher);  // only now may the text be read that a thread wrote
  throw InternalError(
      detail::concat("kernel: ", failure_, " [block ", at.x, " ", at.y, " ", at.z, "]"));
}

void Block::end_launch(const Fiber& launcher) {
  for (unsigned i = 0; i < num_threads_; ++i) {
    if (threads_[i].state != ThreadState::done) threads_[i].fiber->release_as(launcher, &end_tag_);
  }
  race_acquire(&end_tag_);
}

void Block::thread_main() {
  auto& me = static_cast<DeviceThread&>(*current_thread);
  Block& block = *me.block;
  Fiber::begin_fiber(*block.launcher_);
  race_acquire(&block.begin_tag_);
  try {
    (*block.thread_body_)();
    block.leave(me);
  } catch (const std::exception& problem) {
    const Index3 at = me.thread_index;
    block.failure_ = detail::concat(problem.what(), " [thread ", at.x, " ", at.y, " ", at.z, "]");
  }
  race_release(&block.end_tag_);
  // Outside of the handler: an exception that is being handled belongs to the OS thread.
  block.switch_to_next(true);
}

/// The thread has come to its end: whoever waited for it must not wait on.
void Block::leave(DeviceThread& thread) {
  check_copies_done(thread);
  check_products_done(thread);
  thread.state = ThreadState::done;
  --num_alive_;
  idle_yields_ = 0;
  lane_exits(*this, thread);
  Barrier& all = barriers_[0];
  if (all.arrived > 0 && all.expected == 0 && all.arrived == num_alive_) open(all);
}

void Block::make_ready(DeviceThread& thread) {
  thread.state = ThreadState::ready;
  thread.wait_key = nullptr;
  ready_[(first_ready_ + num_ready_++) % num_threads_] = thread.number;
}

/// Null when no thread can run.
DeviceThread* Block::next_ready() {
  while (num_ready_ == 0) {  // the latest moment: nobody can do anything else
    if (!land_tiles(*this)) return nullptr;
  }
  if (options_.order == ThreadOrder::random) {
    unsigned& drawn = ready_[(first_ready_ + random_.next() % num_ready_) % num_threads_];
    const unsigned number = drawn;
    drawn = ready_[first_ready_];
    ready_[first_ready_] = number;
  }
  unsigned& first = ready_[first_ready_];
  if (num_ready_ > 1 && static_cast<int>(first) == options_.slow_thread) {
    unsigned& second = ready_[(first_ready_ + 1) % num_threads_];
    const unsigned slow = first;
    first = second;
    second = slow;
  }
  DeviceThread& next = threads_[ready_[first_ready_]];
  first_ready_ = (first_ready_ + 1) % num_threads_;
  --num_ready_;
  return &next;
}

void Block::switch_to_next(bool is_last) {
  DeviceThread& me = self();
  DeviceThread* next = failure_.empty() ? next_ready() : nullptr;
  if (next == &me) return;
  ++counters_->switches;
  if (next != nullptr) current_thread = next;
  Fiber::switch_between(*me.fiber, next != nullptr ? *next->fiber : *launcher_, is_last);
}

void Block::wait(const char* what, std::uint64_t detail, const void* key) {
  DeviceThread& me = self();
  me.state = ThreadState::waiting;
  me.waits_at = what;
  me.wait_detail = detail;
  me.wait_key = key;
  switch_to_next(false);
}

void Block::wake(const void* key) {
  idle_yields_ = 0;
  for (unsigned i = 0; i < num_threads_; ++i) {
    DeviceThread& it = threads_[i];
    if (it.state == ThreadState::waiting && it.wait_key == key) make_ready(it);
  }
}

void Block::open(Barrier& barrier) {
  idle_yields_ = 0;
  for (DeviceThread* it = barrier.waiting; it != nullptr; it = it->next_waiting) make_ready(*it);
  barrier.waiting = nullptr;
  barrier.arrived = 0;
  ++barrier.phase;
}

void Block::yield() {
  // Each round lets every thread that can run do what it can.
  constexpr std::uint64_t kRounds = 10000;
  if (++idle_yields_ > kRounds * num_threads_) {
    fail("threads keep polling for what no thread of the block will do");
  }
  make_ready(self());
  switch_to_next(false);
}

/// Who waits where, threads in a row with the same wait together.
std::string Block::stuck() const {
  std::string text = "deadlock:";
  for (unsigned i = 0; i < num_threads_;) {
    const DeviceThread& it = threads_[i];
    unsigned end = i + 1;
    const auto alike = [&](const DeviceThread& other) {
      return other.state == it.state &&
             (it.state == ThreadState::done ||
              (other.waits_at == it.waits_at && other.wait_detail == it.wait_detail));
    };
    while (end < num_threads_ && alike(threads_[end])) ++end;
    text += detail::concat(" threads ", i, "-", end - 1,
                           it.state == ThreadState::done ? " have exited" : " wait at ");
    if (it.state != ThreadState::done) {
      text += detail::concat(it.waits_at, " (", std::hex, "0x", it.wait_detail, ")");
    }
    text += end < num_threads_ ? ";" : "";
    i = end;
  }
  return text;
}

SharedAddress shared_address(const void* place) {
  const SharedMemory& shared = current_thread->block->shared();
  const std::ptrdiff_t offset = static_cast<const std::byte*>(place) - shared.data();
  if (offset < 0 || static_cast<std::size_t>(offset) > shared.size_bytes()) {
    fail("a pointer that is not into shared memory was taken for one");
  }
  return kSharedBegin + static_cast<SharedAddress>(offset);
}

std::byte* shared_place(SharedAddress address, std::size_t size, std::size_t alignment) {
  const SharedMemory& shared = current_thread->block->shared();
  if (address % alignment != 0) {
    fail("shared address ", address, ": this access needs a multiple of ", alignment);
  }
  if (address < kSharedBegin || address - kSharedBegin + size > shared.size_bytes()) {
    fail("shared addresses ", address, " to ", address + size, ": the block has ", kSharedBegin,
         " to ", kSharedBegin + shared.size_bytes());
  }
  return shared.data() + (address - kSharedBegin);
}

std::byte* shared_begin() { return current_thread->block->shared().data(); }

namespace {

/// Counts the calling thread in; the barrier may be complete then.
Barrier& arrive(unsigned id, unsigned count, const char* name) {
  Block& block = *current_thread->block;
  if (id >= Block::kBarriers) fail(name, ": barrier ", id, " of ", Block::kBarriers);
  if (count % kWarpLanes != 0 || count > block.num_threads()) {
    fail(name, ": ", count, " threads; expected a multiple of ", kWarpLanes, " up to ",
         block.num_threads());
  }
  Barrier& barrier = block.barrier(id);
  if (barrier.arrived > 0 && barrier.expected != count) {
    fail(name, ": barrier ", id, " for ", count, " threads while others use it for ",
         barrier.expected);
  }
  ++block.counters().barriers;
  barrier.expected = count;
  ++barrier.arrived;
  race_release(&barrier.tags[barrier.phase % 2]);
  return barrier;
}

bool is_complete(const Block& block, const Barrier& barrier) {
  return barrier.arrived == (barrier.expected == 0 ? block.num_alive() : barrier.expected);
}

}  // namespace

void barrier_sync(unsigned id, unsigned count, const char* name) {
  Block& block = *current_thread->block;
  Barrier& barrier = arrive(id, count, name);
  char* tag = &barrier.tags[barrier.phase % 2];
  if (is_complete(block, barrier)) {
    block.open(barrier);
  } else {
    DeviceThread& me = block.self();
    me.next_waiting = barrier.waiting;
    barrier.waiting = &me;
    block.wait(name, id);
  }
  race_acquire(tag);
}

void barrier_arrive(unsigned id, unsigned count) {
  Barrier& barrier = arrive(id, count, "barrier_arrive");
  Block& block = *current_thread->block;
  if (is_complete(block, barrier)) block.open(barrier);
}

void yield() { current_thread->block->yield(); }

}  // namespace cpattn::cuda_host
