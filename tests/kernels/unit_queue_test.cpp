// The queue of the backward's units under real threads: what it promises of order is what makes the
// sums race-free, so the thread sanitizer judges it too (the vectors below have no lock).
#include "kernels/cpu/unit_queue.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "src/device/memory.h"
#include "tests/support/random.h"

namespace cpattn::cpu {
namespace {

constexpr std::int64_t kQBlocks = 5, kKvBlocks = 4, kHeads = 3, kTasks = 200;

std::vector<GradientTask> random_tasks(std::uint64_t seed) {
  std::vector<GradientTask> tasks(kTasks);
  for (std::uint64_t i = 0; i < kTasks; ++i) {
    tasks[i].q_chunk =
        static_cast<std::int32_t>(testing::random_integer(seed, 2 * i, 0, kQBlocks - 1));
    tasks[i].kv_block =
        static_cast<std::int32_t>(testing::random_integer(seed, 2 * i + 1, 0, kKvBlocks - 1));
  }
  return tasks;
}

TEST(UnitQueue, KeepsTheOrderOfChunksAndDealsEveryUnitOnce) {
  for (const int num_threads : {1, 2, 5}) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      const std::vector<GradientTask> tasks = random_tasks(seed);
      Buffer memory(UnitQueue::bytes(kQBlocks, kKvBlocks, kHeads));
      UnitQueue queue(tasks, kQBlocks, kKvBlocks, kHeads, memory.data());
      std::vector<std::vector<std::int64_t>> of_q(kQBlocks * kHeads), of_kv(kKvBlocks * kHeads);
      const auto work = [&] {
        UnitQueue::Unit unit;
        while (queue.take(unit)) {
          queue.await(unit, [] {});
          const GradientTask& task = tasks[static_cast<std::size_t>(unit.task)];
          of_q[static_cast<std::size_t>(task.q_chunk * kHeads + unit.kv_head)].push_back(unit.task);
          of_kv[static_cast<std::size_t>(task.kv_block * kHeads + unit.kv_head)].push_back(
              unit.task);
          queue.finish(unit);
        }
      };
      std::vector<std::thread> threads;
      for (int i = 0; i < num_threads; ++i) threads.emplace_back(work);
      for (std::thread& thread : threads) thread.join();

      std::vector<std::vector<std::int64_t>> q_expected(of_q.size()), kv_expected(of_kv.size());
      for (std::int64_t i = 0; i < kTasks; ++i) {
        const GradientTask& task = tasks[static_cast<std::size_t>(i)];
        for (std::int64_t head = 0; head < kHeads; ++head) {
          q_expected[static_cast<std::size_t>(task.q_chunk * kHeads + head)].push_back(i);
          kv_expected[static_cast<std::size_t>(task.kv_block * kHeads + head)].push_back(i);
        }
      }
      EXPECT_EQ(of_q, q_expected);
      EXPECT_EQ(of_kv, kv_expected);
    }
  }
}

TEST(UnitQueue, WithoutTasksThereIsNothingToTake) {
  Buffer memory(UnitQueue::bytes(1, 1, 1));
  UnitQueue queue({}, 1, 1, 1, memory.data());
  UnitQueue::Unit unit;
  EXPECT_FALSE(queue.take(unit));
}

}  // namespace
}  // namespace cpattn::cpu
