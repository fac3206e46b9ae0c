// What only these kernels have to show: they are right however threads are ordered, copies land and
// tasks are cut into steps. Their results are judged by the tests of all backends.
#include "kernels/cuda/backward_sm80.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/gradient_slots.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"

namespace cpattn::cuda {
namespace {

using testing::bits_equal;
using testing::bounded_gradients;
using testing::BoundedGradients;
using testing::GradientInputs;
using testing::GradientRun;
using testing::GradientRunner;
using testing::Gradients;

class BackwardSm80 : public HostTest {
 protected:
  void SetUp() override {
    HostTest::SetUp();
    testing::tested().stream = {static_cast<cudaStream_t>(&executor_)};
  }
  void TearDown() override {
    testing::tested().stream = {};
    HostTest::TearDown();
  }

  static GradientInputs causal_inputs(const AttentionShape& shape, std::int64_t rows,
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

  static Gradients run(const GradientInputs& in, const GradientRun& how) {
    GradientRunner runner(sm80_kernels(), in, how);
    poison_slots(runner.args());
    return runner.backward();
  }

  static void expect_equal(const Gradients& actual, const Gradients& expected) {
    EXPECT_TRUE(bits_equal(actual.dq, expected.dq)) << "dq";
    EXPECT_TRUE(bits_equal(actual.dk, expected.dk)) << "dk";
    EXPECT_TRUE(bits_equal(actual.dv, expected.dv)) << "dv";
  }
};

TEST_F(BackwardSm80, EveryConfigurationInAllModes) {
  struct Case {
    std::int64_t heads, dim, value_dim, rows, keys, row_chunk, key_chunk;
  };
  // Two and four panels of sums, not all of them used; tiles, slices and chunks that end in the
  // middle.
  for (const Case& it : {Case{2, 40, 24, 70, 131, 50, 0}, Case{1, 72, 100, 35, 67, 0, 40},
                         Case{1, 130, 16, 20, 66, 0, 0}, Case{1, 16, 200, 18, 66, 0, 0}}) {
    SCOPED_TRACE(it.dim);
    const GradientInputs in = causal_inputs(testing::make_shape(it.heads, 1, it.dim, it.value_dim),
                                            it.rows, it.keys, DType::bf16);
    const GradientRun how{.row_chunk = it.row_chunk, .key_chunk = it.key_chunk, .num_threads = 2};
    const Gradients first = run(in, how);
    const BoundedGradients expected = bounded_gradients(in, sm80_kernels().numerics(DType::bf16));
    EXPECT_TRUE(expected.dq.accepts(first.dq));
    EXPECT_TRUE(expected.dk.accepts(first.dk));
    EXPECT_TRUE(expected.dv.accepts(first.dv));
    in_all_modes([&] { expect_equal(run(in, how), first); });
  }
}

TEST_F(BackwardSm80, FitsTheLeastSharedMemoryWithoutBankConflicts) {
  executor_.set_options({.max_shared_bytes = 99 * 1024});
  for (const auto& [dim, value_dim] : {std::pair{64, 64}, {128, 128}, {256, 256}, {256, 8}}) {
    executor_.reset_counters();
    run(causal_inputs(testing::make_shape(1, 1, dim, value_dim), 17, 33, DType::f16), {});
    EXPECT_GT(executor_.counters().ldmatrix_phases, 0u);
    EXPECT_EQ(executor_.counters().ldmatrix_conflicts, 0u) << dim << " " << value_dim;
  }
}

TEST_F(BackwardSm80, BlocksAreAsManyAsWorkAtATime) {
  const GradientInputs in = causal_inputs(testing::make_shape(4, 2, 16, 16), 140, 150, DType::f16);
  const Gradients one = run(in, {.num_threads = 1});
  for (const int num_blocks : {2, 5, 100}) {
    GradientRunner runner(sm80_kernels(), in, {.num_threads = num_blocks});
    BackwardArgs args = runner.args();
    const std::vector<std::byte> image = sm80_gradient::step_image(args);
    Buffer memory(image.size());
    std::copy(image.begin(), image.end(), memory.data());
    args.image = memory.data();
    executor_.reset_counters();
    sm80_gradient::backward(args);
    // dk, dv: 2 tiles of 128 keys x 2 heads; dq: 2 tiles of 128 rows x 4 heads.
    EXPECT_EQ(executor_.counters().blocks,
              static_cast<std::uint64_t>(std::min(num_blocks, 4) + std::min(num_blocks, 8)));
    EXPECT_TRUE(bits_equal(runner.result().dq, one.dq));
    expect_equal(run(in, {.num_threads = num_blocks}), one);
  }
}

/// A step is any run of tasks: slots carry what was begun.
TEST_F(BackwardSm80, StepsChangeNothing) {
  for (const bool continues : {false, true}) {
    const GradientInputs in =
        causal_inputs(testing::make_shape(2, 1, 24, 16), 100, 150, DType::bf16);
    const GradientRun how{.row_chunk = 40, .key_chunk = 60, .continues = continues};
    const Gradients expected = run(in, how);
    for (const std::size_t tasks_per_step : {1u, 2u, 5u}) {
      GradientRunner runner(sm80_kernels(), in, how);
      poison_slots(runner.args());
      const std::span<const GradientTask> all = runner.args().tasks;
      for (std::size_t first = 0; first < all.size(); first += tasks_per_step) {
        BackwardArgs args = runner.args();
        args.tasks = all.subspan(first, std::min(tasks_per_step, all.size() - first));
        const Buffer image = testing::image_of(sm80_kernels().gradient.step_image, args);
        args.image = image.data();
        sm80_kernels().gradient.backward(args);
      }
      sm80_kernels().gradient.sum_dkv(runner.sum_args());
      expect_equal(runner.result(), expected);
    }
  }
}

TEST_F(BackwardSm80, WhatCannotBeRunIsRefused) {
  const GradientInputs in = causal_inputs(testing::make_shape(1, 1, 16, 16), 20, 20, DType::bf16);
  GradientRunner runner(sm80_kernels(), in);
  BackwardArgs args = runner.args();
  args.image = nullptr;
  EXPECT_THROW(sm80_gradient::backward(args), InvalidArgument);
  args.tasks = {};
  EXPECT_NO_THROW(sm80_gradient::backward(args));
  args = runner.args();
  ++args.dq_slots;
  EXPECT_THROW(sm80_gradient::backward(args), InvalidArgument);
}

}  // namespace
}  // namespace cpattn::cuda
