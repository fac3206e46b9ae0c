#include "kernels/cuda/host/mbarrier.h"

#include "kernels/cuda/host/block.h"
#include "kernels/cuda/host/sanitizers.h"

namespace cpattn::cuda_host {
namespace {

constexpr unsigned kMaxArrivals = (1u << 20) - 1;
constexpr long kMaxBytes = (1l << 20) - 1;

struct State {
  std::uint64_t expected : 20;
  std::uint64_t pending : 20;
  std::uint64_t phase : 1;
  std::int64_t bytes : 23;  ///< expected and not come; below 0 where they come first
};
static_assert(sizeof(State) == 8);

State& state_at(Block& block, SharedAddress at) {
  auto* state = reinterpret_cast<State*>(block.shared().data() + (at - kSharedBegin));
  // What shared memory is filled with.
  if (state->expected == kMaxArrivals) fail("mbarrier ", at, " was not initialised");
  return *state;
}

State& state_at(SharedAddress at) {
  shared_place(at, sizeof(State), alignof(State));
  return state_at(*current_thread->block, at);
}

/// One tag for each parity.
void* tag_of(State& state, unsigned parity) { return reinterpret_cast<char*>(&state) + parity; }

void complete_if_due(Block& block, State& state) {
  if (state.pending != 0 || state.bytes != 0) return;
  state.phase ^= 1u;
  state.pending = state.expected;
  block.wake(&state);
}

void expect(State& state, SharedAddress at, long change) {
  const long bytes = static_cast<long>(state.bytes) + change;
  if (bytes > kMaxBytes || bytes < -kMaxBytes) {
    fail("mbarrier ", at, ": ", bytes, " bytes outstanding; at most ", kMaxBytes);
  }
  state.bytes = bytes;
}

}  // namespace

void mbarrier_init(SharedAddress at, unsigned num_arrivals) {
  if (num_arrivals == 0 || num_arrivals >= kMaxArrivals) {
    fail("mbarrier ", at, ": ", num_arrivals, " arrivals; expected 1 to ", kMaxArrivals - 1);
  }
  auto& state = *reinterpret_cast<State*>(shared_place(at, sizeof(State), alignof(State)));
  state.expected = state.pending = num_arrivals;
  state.phase = 0;
  state.bytes = 0;
}

void mbarrier_release(SharedAddress at) {
  State& state = state_at(at);
  race_release(tag_of(state, state.phase));
}

void mbarrier_arrive(SharedAddress at) {
  State& state = state_at(at);
  if (state.pending == 0) {
    fail("mbarrier ", at, ": more than the ", state.expected + 0, " arrivals of a phase");
  }
  race_release(tag_of(state, state.phase));
  --state.pending;
  complete_if_due(*current_thread->block, state);
}

void mbarrier_arrive_expect_bytes(SharedAddress at, unsigned num_bytes) {
  expect(state_at(at), at, static_cast<long>(num_bytes));
  mbarrier_arrive(at);
}

void mbarrier_complete_bytes(Block& block, SharedAddress at, unsigned num_bytes) {
  State& state = state_at(block, at);
  expect(state, at, -static_cast<long>(num_bytes));
  complete_if_due(block, state);
}

void mbarrier_wait(SharedAddress at, unsigned parity) {
  State& state = state_at(at);
  parity &= 1u;
  // A wake is not a promise: the barrier may be two phases on.
  while (state.phase == parity) {
    current_thread->block->wait(parity == 0 ? "mbarrier (parity 0)" : "mbarrier (parity 1)", at,
                                &state);
  }
  race_acquire(tag_of(state, parity));
}

}  // namespace cpattn::cuda_host
