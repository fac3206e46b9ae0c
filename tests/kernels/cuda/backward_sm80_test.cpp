// What only these kernels have to show: they are right however threads are ordered, copies land and
// tasks are cut into steps. Their results are judged by the tests of all backends.
#include "kernels/cuda/backward_sm80.h"

#include <algorithm>
#include <vector>

#include "tests/kernels/cuda/backward_test.h"

namespace cpattn::cuda {
namespace {

using testing::bits_equal;
using testing::GradientInputs;
using testing::GradientRun;
using testing::GradientRunner;
using testing::Gradients;

class BackwardSm80 : public BackwardTest {
 protected:
  static Gradients run(const GradientInputs& in, const GradientRun& how) {
    return BackwardTest::run(sm80_kernels(), in, how);
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
    EXPECT_TRUE(is_accurate(sm80_kernels(), in, first));
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
  // 2 tiles of 128 keys x 2 heads; 2 tiles of 128 rows x 4 heads.
  expect_blocks(sm80_kernels(), in, {.dkv = 4, .dq = 8}, run(in, {.num_threads = 1}));
}

TEST_F(BackwardSm80, StepsChangeNothing) {
  const GradientInputs in = causal_inputs(testing::make_shape(2, 1, 24, 16), 100, 150, DType::bf16);
  for (const bool continues : {false, true}) {
    const GradientRun how{.row_chunk = 40, .key_chunk = 60, .continues = continues};
    expect_steps_change_nothing(sm80_kernels(), in, how, run(in, how));
  }
}

TEST_F(BackwardSm80, WhatCannotBeRunIsRefused) {
  const GradientInputs in = causal_inputs(testing::make_shape(1, 1, 16, 16), 20, 20, DType::bf16);
  expect_refusals(sm80_gradient::backward, sm80_kernels(), in);
}

}  // namespace
}  // namespace cpattn::cuda
