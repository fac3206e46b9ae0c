// What tests of the backward kernels on the host share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/gradient_slots.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"

namespace cpattn::cuda {

class BackwardTest : public HostTest {
 protected:
  void SetUp() override {
    HostTest::SetUp();
    testing::tested().stream = {static_cast<cudaStream_t>(&executor_)};
  }
  void TearDown() override {
    testing::tested().stream = {};
    HostTest::TearDown();
  }

  /// The last row sees all keys.
  static testing::GradientInputs causal_inputs(const AttentionShape& shape, std::int64_t rows,
                                               std::int64_t keys, DType dtype) {
    return testing::random_gradient_inputs(shape, rows, keys, {MaskKind::causal, 1 + keys - rows},
                                           dtype, 3);
  }

  /// Slots hold NaN before: what is read was written.
  static void poison_slots(const BackwardArgs& args) {
    std::fill_n(args.dq_slots, args.q_blocks.size() * dq_slot_bytes(args.problem), std::byte{0xff});
    for (std::size_t i = 0; i < args.dkv_slots.size(); ++i) {
      std::fill_n(args.dkv_slots[i], dkv_slot_bytes(args.problem, args.kv_blocks[i].num_keys),
                  std::byte{0xff});
    }
  }

  static testing::Gradients run(const KernelTable& table, const testing::GradientInputs& in,
                                const testing::GradientRun& how) {
    testing::GradientRunner runner(table, in, how);
    poison_slots(runner.args());
    return runner.backward();
  }

  /// Likewise in steps of a few tasks.
  static testing::Gradients run_in_steps(const KernelTable& table,
                                         const testing::GradientInputs& in,
                                         const testing::GradientRun& how,
                                         std::size_t tasks_per_step) {
    testing::GradientRunner runner(table, in, how);
    poison_slots(runner.args());
    const std::span<const GradientTask> all = runner.args().tasks;
    for (std::size_t first = 0; first < all.size(); first += tasks_per_step) {
      BackwardArgs args = runner.args();
      args.tasks = all.subspan(first, std::min(tasks_per_step, all.size() - first));
      const Buffer image = testing::image_of(table.gradient.step_image, args);
      args.image = image.data();
      table.gradient.backward(args);
    }
    table.gradient.sum_dkv(runner.sum_args());
    return runner.result();
  }

  /// A step is any run of tasks: slots carry what was begun.
  static void expect_steps_change_nothing(const KernelTable& table,
                                          const testing::GradientInputs& in,
                                          const testing::GradientRun& how,
                                          const testing::Gradients& expected) {
    for (const std::size_t tasks_per_step : {1u, 2u, 5u})
      expect_equal(run_in_steps(table, in, how, tasks_per_step), expected);
  }

  /// Tiles of all heads in the two launches of a backward.
  struct NumItems {
    int dkv = 0;
    int dq = 0;
  };

  /// Thread blocks are as many as work at a time, or as there are tiles; no bit depends on it.
  void expect_blocks(const KernelTable& table, const testing::GradientInputs& in,
                     const NumItems& items, const testing::Gradients& expected) {
    for (const int num_blocks : {1, 2, 5, 100}) {
      testing::GradientRunner runner(table, in, {.num_threads = num_blocks});
      BackwardArgs args = runner.args();
      const Buffer image = testing::image_of(table.gradient.step_image, args);
      args.image = image.data();
      executor_.reset_counters();
      table.gradient.backward(args);
      EXPECT_EQ(executor_.counters().blocks,
                static_cast<std::uint64_t>(std::min(num_blocks, items.dkv) +
                                           std::min(num_blocks, items.dq)));
      table.gradient.sum_dkv(runner.sum_args());
      expect_equal(runner.result(), expected);
    }
  }

  /// `backward` of `table`: no image, no slots at aligned addresses; nothing to do is no error.
  static void expect_refusals(void (*backward)(const BackwardArgs& args), const KernelTable& table,
                              const testing::GradientInputs& in) {
    testing::GradientRunner runner(table, in);
    BackwardArgs args = runner.args();
    args.image = nullptr;
    EXPECT_THROW(backward(args), InvalidArgument);
    args.tasks = {};
    EXPECT_NO_THROW(backward(args));
    args = runner.args();
    ++args.dq_slots;
    EXPECT_THROW(backward(args), InvalidArgument);
  }

  static bool is_equal(const testing::Gradients& a, const testing::Gradients& b) {
    return testing::bits_equal(a.dq, b.dq) && testing::bits_equal(a.dk, b.dk) &&
           testing::bits_equal(a.dv, b.dv);
  }
  static void expect_equal(const testing::Gradients& actual, const testing::Gradients& expected) {
    EXPECT_TRUE(testing::bits_equal(actual.dq, expected.dq)) << "dq";
    EXPECT_TRUE(testing::bits_equal(actual.dk, expected.dk)) << "dk";
    EXPECT_TRUE(testing::bits_equal(actual.dv, expected.dv)) << "dv";
  }

  /// Within the bounds of the accuracy tests.
  static bool is_accurate(const KernelTable& table, const testing::GradientInputs& in,
                          const testing::Gradients& actual) {
    const testing::BoundedGradients expected =
        testing::bounded_gradients(in, table.numerics(in.q.dtype()));
    return expected.dq.accepts(actual.dq) && expected.dk.accepts(actual.dk) &&
           expected.dv.accepts(actual.dv);
  }
};

}  // namespace cpattn::cuda
