// The f32 backward against the CPU's f32 engine: the same bits of dq, dk and dv, however it is cut,
// ordered and executed. Accuracy is judged by the tests of all backends.
#include "kernels/cuda/backward_f32.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/gradient_slots.h"
#include "kernels/cuda/kernel_table.h"
#include "tests/kernels/cuda/backward_test.h"
#include "tests/support/attention_case.h"
#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"

namespace cpattn::cuda {
namespace {

using testing::bits_equal;
using testing::GradientInputs;
using testing::GradientRun;
using testing::GradientRunner;
using testing::Gradients;
using testing::HostTensor;
using testing::kInf;
using testing::kNan;

/// As little shared memory as any of the architectures has.
constexpr std::size_t kLeastSharedBytes = 99 * 1024;

const KernelTable& cpu_table() { return *available_kernels().front(); }

struct Shape {
  std::int64_t rows, keys, heads, kv_heads, dim, value_dim;
};

/// Causal: bottom-right. With dlse where the seed is odd.
GradientInputs make_inputs(const Shape& it, MaskKind mask, std::uint64_t seed) {
  GradientInputs in = testing::random_gradient_inputs(
      testing::make_shape(it.heads, it.kv_heads, it.dim, it.value_dim), it.rows, it.keys,
      {mask, 1 + it.keys - it.rows}, DType::f32, seed);
  for (std::int64_t i = 0; seed % 2 == 1 && i < it.rows * it.heads; ++i)
    in.dlse.push_back(testing::random_normal(seed, static_cast<std::uint64_t>(i)));
  return in;
}

/// The CPU's kernels get one thread: the thread sanitizer does not know OpenMP's barriers.
Gradients run_on_cpu(const GradientInputs& in, GradientRun how = {}) {
  how.num_threads = 1;
  return testing::run_gradient(cpu_table(), in, how);
}

class BackwardF32 : public BackwardTest {
 protected:
  void SetUp() override {
    BackwardTest::SetUp();
    executor_.set_options({.max_shared_bytes = kLeastSharedBytes});
  }

  static Gradients run(const GradientInputs& in, const GradientRun& how = {}) {
    return BackwardTest::run(sm80_kernels(), in, how);
  }

  static void expect_bits_of_cpu(const GradientInputs& in, const GradientRun& how = {}) {
    expect_equal(run(in, how), run_on_cpu(in, how));
  }
};

TEST_F(BackwardF32, HeadSizes) {
  std::uint64_t seed = 1;
  for (const auto& [dim, value_dim] :
       {std::pair{1, 1}, {8, 40}, {40, 8}, {64, 64}, {65, 63}, {96, 128}, {256, 130}, {30, 256}}) {
    SCOPED_TRACE(::testing::Message() << dim << " and " << value_dim);
    expect_bits_of_cpu(make_inputs({40, 150, 2, 1, dim, value_dim}, MaskKind::causal, ++seed),
                       {.num_threads = 2});
  }
}

TEST_F(BackwardF32, LengthsAroundTiles) {
  std::uint64_t seed = 20;
  for (const auto& [rows, keys] :
       {std::pair{1, 1}, {47, 63}, {48, 64}, {49, 65}, {63, 127}, {64, 128}, {97, 129}, {130, 7}}) {
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << keys << " keys");
      expect_bits_of_cpu(make_inputs({rows, keys, 1, 1, 16, 16}, mask, ++seed));
    }
  }
}

TEST_F(BackwardF32, GroupsOfHeads) {
  std::uint64_t seed = 40;
  for (const auto& [heads, kv_heads] : {std::pair{6, 2}, {3, 3}, {5, 1}}) {
    SCOPED_TRACE(::testing::Message() << heads << " heads, " << kv_heads << " kv heads");
    expect_bits_of_cpu(make_inputs({60, 70, heads, kv_heads, 20, 12}, MaskKind::causal, ++seed));
  }
}

/// Chunks of q and of keys, tasks in either order, sums of leaves and continued sums.
TEST_F(BackwardF32, ChunksAndSums) {
  const GradientInputs in = make_inputs({130, 170, 2, 1, 24, 16}, MaskKind::causal, 51);
  for (const GradientRun& how : {GradientRun{.row_chunk = 50, .key_chunk = 60},
                                 {.row_chunk = 17, .keys_outermost = true},
                                 {.row_chunk = 70, .key_chunk = 150, .continues = true}}) {
    SCOPED_TRACE(how.row_chunk);
    expect_bits_of_cpu(in, how);
  }
}

TEST_F(BackwardF32, EveryWayToExecuteIt) {
  const GradientInputs in = make_inputs({70, 140, 2, 1, 20, 12}, MaskKind::causal, 61);
  const GradientRun how{.row_chunk = 50, .num_threads = 2};
  const Gradients expected = run_on_cpu(in, how);
  in_all_modes([&] { expect_equal(run(in, how), expected); });
}

TEST_F(BackwardF32, BlocksAreAsManyAsWorkAtATime) {
  const GradientInputs in = make_inputs({140, 150, 4, 2, 16, 16}, MaskKind::causal, 62);
  // 3 tiles of 64 keys x 2 heads; 3 tiles of 64 rows x 4 heads.
  expect_blocks(sm80_kernels(), in, {.dkv = 6, .dq = 12}, run_on_cpu(in));
}

TEST_F(BackwardF32, StepsChangeNothing) {
  const GradientInputs in = make_inputs({100, 150, 2, 1, 24, 16}, MaskKind::causal, 63);
  for (const bool continues : {false, true}) {
    const GradientRun how{.row_chunk = 40, .key_chunk = 60, .continues = continues};
    expect_steps_change_nothing(sm80_kernels(), in, how, run_on_cpu(in, how));
  }
}

TEST_F(BackwardF32, ScalesAndTypesOfGradients) {
  GradientInputs in = make_inputs({50, 90, 2, 2, 12, 10}, MaskKind::causal, 71);
  for (const double scale : {-0.3, 0.0, 30.0}) {
    in.shape.softmax_scale = scale;
    expect_bits_of_cpu(in);
  }
  in = make_inputs({50, 90, 2, 2, 12, 10}, MaskKind::causal, 72);
  in.out_dtype = DType::bf16;
  in.dout = HostTensor(DType::f16, in.dout.shape()).fill_normal(73);
  for (const DType dtype : {DType::f16, DType::bf16})
    expect_bits_of_cpu(in, {.gradient_dtype = dtype});
}

TEST_F(BackwardF32, ExtremeLogits) {
  GradientInputs in = make_inputs({40, 300, 1, 1, 24, 24}, MaskKind::causal, 81);
  in.q.fill_normal(82, 300.0f);
  expect_bits_of_cpu(in);
  in.q.fill_normal(83, 1e-30f);
  in.k.fill_normal(84, 1e-12f);  // products that underflow
  expect_bits_of_cpu(in);
}

/// Rows 0 to 29 see nothing; row 95 sees logits of -inf only.
TEST_F(BackwardF32, EmptyRowsAndHiddenPoison) {
  GradientInputs in = make_inputs({100, 70, 2, 1, 20, 20}, MaskKind::causal, 85);
  for (std::int64_t d = 0; d < 20; ++d) in.q.set(95, 0, d, d == 0 ? -kInf : 0.0f);
  for (std::int64_t key = 0; key < 70; ++key)
    in.k.set(key, 0, 0, 1.0f + std::abs(in.k.at(key, 0, 0)));
  const GradientRun how{.row_chunk = 60, .key_chunk = 40};
  const Gradients expected = run_on_cpu(in, how);
  EXPECT_EQ(expected.dq.at(3, 0, 0), 0.0f);
  EXPECT_EQ(expected.dq.at(95, 0, 0), 0.0f);
  EXPECT_FALSE(std::isnan(expected.dk.at(0, 0, 0)));
  expect_equal(run(in, how), expected);
  for (const float poison : {kNan, kInf, -kInf}) {
    GradientInputs poisoned = in;
    for (std::int64_t d = 0; d < 20; ++d) {
      poisoned.k.set(69, 0, d, poison);  // seen by row 99 alone
      poisoned.v.set(69, 0, d, poison);
      for (std::int64_t row = 0; row < 30; ++row) {
        poisoned.q.set(row, 1, d, poison);
        poisoned.dout.set(row, 1, d, poison);
      }
    }
    const Gradients result = run(poisoned, how);
    for (std::int64_t row = 0; row < 99; ++row)
      for (std::int64_t d = 0; d < 20; ++d)
        ASSERT_EQ(result.dq.bits_at(row, 1, d), expected.dq.bits_at(row, 1, d)) << row;
    EXPECT_TRUE(std::isnan(result.dq.at(99, 1, 19)));
  }
}

/// Odd strides, and padding that holds NaN before, in what is read and in what is written.
TEST_F(BackwardF32, StridesAndPoisonedPadding) {
  const GradientInputs in = make_inputs({66, 130, 2, 2, 19, 13}, MaskKind::causal, 87);
  GradientInputs strided = in;
  strided.q = in.q.with_strides({2 * 23 + 5, 23, 1});
  strided.k = in.k.with_strides({2 * 20, 20, 1});
  strided.v = in.v.with_strides({15, 15 * 130, 1});  // heads outermost
  strided.dout = in.dout.with_strides({2 * 13 + 1, 13, 1});
  const GradientRun how{.row_chunk = 40, .key_chunk = 70};
  GradientRunner runner(sm80_kernels(), strided, how);
  poison_slots(runner.args());
  runner.result() = {HostTensor(DType::f32, in.q.shape(), {19, 19 * 67, 1}),
                     HostTensor(DType::f32, in.k.shape(), {2 * 21 + 3, 21, 1}),
                     HostTensor(DType::f32, in.v.shape(), {17, 17 * 130, 1})};
  expect_equal(runner.backward(), run_on_cpu(in, how));
}

TEST_F(BackwardF32, WhatCannotBeRunIsRefused) {
  const GradientInputs in = make_inputs({20, 20, 1, 1, 16, 16}, MaskKind::causal, 88);
  expect_refusals(f32::backward, sm80_kernels(), in);
}

}  // namespace
}  // namespace cpattn::cuda
