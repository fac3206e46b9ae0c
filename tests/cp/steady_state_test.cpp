// After the first forward and backward a plan allocates nothing of the problem's size. Every
// allocation of the process is counted, the transport's own included, by taking the place of the C
// library's functions.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "src/comm/mpi_comm.h"
#include "src/comm/self_comm.h"
#include "tests/support/batches.h"
#include "tests/support/one_layer.h"

extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
}

namespace {

std::atomic<bool> is_counting{false};
std::atomic<std::size_t> num_calls{0}, num_short{0}, num_bytes{0}, largest{0};

/// Less than the threads' runtime takes at a time, more than any message of ours has letters.
constexpr std::size_t kShort = 512;

void count(std::size_t size) {
  if (!is_counting) return;
  ++num_calls;
  if (size < kShort) ++num_short;
  num_bytes += size;
  std::size_t before = largest;
  while (before < size && !largest.compare_exchange_weak(before, size)) {
  }
}

}  // namespace

extern "C" {
void* malloc(std::size_t size) {
  count(size);
  return __libc_malloc(size);
}
void* calloc(std::size_t number, std::size_t size) {
  count(number * size);
  return __libc_calloc(number, size);
}
void* realloc(void* memory, std::size_t size) {
  count(size);
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  count(size);
  *memory = __libc_memalign(alignment, size);
  return *memory != nullptr ? 0 : ENOMEM;
}
}

namespace cpattn::testing {
namespace {

struct Counted {
  std::size_t calls = 0;
  std::size_t short_calls = 0;  ///< of less than kShort bytes
  std::size_t bytes = 0;
  std::size_t largest = 0;
};

template <class Body>
Counted counted(const Body& body) {
  num_calls = num_short = num_bytes = largest = 0;
  is_counting = true;
  body();
  is_counting = false;
  return {num_calls, num_short, num_bytes, largest};
}

AttentionCase problem_of_length(std::int64_t tokens) {
  return make_random_case(make_shape(4, 2, 64, 64), pack({tokens, tokens / 2}),
                          test_config(MaskKind::causal, 64), DType::f32, 1);
}

/// Allocations of one forward and backward once `warm_up` of them have been made.
Counted steady_state(const AttentionCase& problem, const std::shared_ptr<Communicator>& group,
                     int warm_up) {
  const auto planned = ContextParallelAttention(group, problem.config).plan(problem_of(problem));
  RankGradients rank(problem, random_upstream(problem, 1), planned->plan().shard(), DType::f32);
  const ForwardTensors forward = rank.forward.views();
  const BackwardTensors backward = rank.views();
  const auto layer = [&] {
    planned->forward(forward);
    planned->backward(backward);
  };
  for (int i = 0; i < warm_up; ++i) layer();
  return counted(layer);
}

TEST(SteadyState, TheCounterCounts) {
  const Counted found = counted([] {
    Buffer(12345);
    ::operator delete(::operator new(100));  // a call that may not be left out
  });
  EXPECT_EQ(found.calls, 2u);
  EXPECT_GE(found.largest, 12345u);
}

/// More than messages and the threads' runtime need, less than any tensor of these problems.
constexpr std::size_t kSmallBlock = 4096;

/// What it takes to hear that no rank refuses anything.
Counted one_exchange_of_text(Communicator& group) {
  const auto deadline = deadline_after(Seconds(30));
  return counted([&] { refuse_together(group, "", deadline, "test"); });
}

// One rank: the same few small blocks whatever the length. The short ones are what forward and
// backward each take to hear that nobody refuses: no text is put together for a check that passes.
TEST(SteadyState, OneRankAllocatesTheSameForEveryLength) {
  const auto group = std::make_shared<SelfCommunicator>();
  const Counted exchange = one_exchange_of_text(*group);
  const Counted shorter = steady_state(problem_of_length(256), group, 1);
  const Counted longer = steady_state(problem_of_length(2048), group, 1);
  EXPECT_EQ(shorter.calls, longer.calls);
  EXPECT_EQ(shorter.bytes, longer.bytes);
  EXPECT_LT(longer.largest, kSmallBlock);
  EXPECT_EQ(longer.short_calls, 2 * exchange.short_calls);
}

// Several: the exchange of one line of text per rank, and what MPI needs for its own.
TEST(SteadyState, NothingOfThePlansSizeIsAllocated) {
  const auto group = std::make_shared<MpiCommunicator>();
  const AttentionCase problem = problem_of_length(2048);
  const Counted found = steady_state(problem, group, 3);
  const Explanation told =
      ContextParallelAttention(group, problem.config).explain(problem_of(problem));
  ASSERT_GT(told.forward_memory_bytes, std::size_t{1} << 20);
  EXPECT_LT(found.largest, kSmallBlock);
  EXPECT_LT(found.bytes, told.forward_memory_bytes / 10);
}

}  // namespace
}  // namespace cpattn::testing
