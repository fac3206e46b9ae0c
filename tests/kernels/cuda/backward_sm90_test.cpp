// What only Hopper's backward has to show: it is right however threads are ordered and copies and
// products land, and it is the portable backward computed otherwise. Its results are judged by the
// tests of all backends; that its waits are needed, by planted faults
// (backward_sm90_faults_test.cpp).
#include "kernels/cuda/backward_sm90.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/kernels/cuda/backward_test.h"

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

class BackwardSm90 : public BackwardTest {
 protected:
  static Gradients run(const GradientInputs& in, const GradientRun& how) {
    return BackwardTest::run(sm90_kernels(), in, how);
  }

  /// Hopper's backward behind the portable forward, so that lse and delta have the same bits.
  static const KernelTable& behind_portable_forward() {
    static const KernelTable table = [] {
      KernelTable both = sm80_kernels();
      both.gradient = sm90_kernels().gradient;
      return both;
    }();
    return table;
  }
};

TEST_F(BackwardSm90, EveryConfigurationInAllModes) {
  struct Case {
    std::int64_t heads, kv_heads, dim, value_dim, rows, keys, row_chunk, key_chunk;
  };
  // One and two panels, not all of them used; items, tiles and chunks that end in the middle; the
  // second consumer without rows; stages that come round several times.
  for (const Case& it : {Case{2, 1, 40, 24, 150, 131, 140, 0}, Case{1, 1, 72, 128, 35, 200, 0, 140},
                         Case{2, 2, 16, 100, 66, 70, 0, 0}, Case{1, 1, 128, 8, 130, 66, 0, 0}}) {
    SCOPED_TRACE(it.dim);
    const GradientInputs in =
        causal_inputs(testing::make_shape(it.heads, it.kv_heads, it.dim, it.value_dim), it.rows,
                      it.keys, DType::bf16);
    const GradientRun how{.row_chunk = it.row_chunk, .key_chunk = it.key_chunk, .num_threads = 2};
    const Gradients first = run(in, how);
    EXPECT_TRUE(is_accurate(sm90_kernels(), in, first));
    in_all_modes([&] { expect_equal(run(in, how), first); });
  }
}

/// The host layer adds up the products of mma and of wgmma in the same order, so that here, and
/// here only, both backwards must agree in every bit.
TEST_F(BackwardSm90, HasThePortableBitsOnTheHost) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const auto& [dim, value_dim] : {std::pair{33, 64}, {128, 72}}) {
      SCOPED_TRACE(dim);
      const GradientInputs in =
          causal_inputs(testing::make_shape(2, 1, dim, value_dim), 150, 230, dtype);
      const GradientRun how{.row_chunk = 100, .key_chunk = 140, .continues = dtype == DType::f16};
      expect_equal(BackwardTest::run(behind_portable_forward(), in, how),
                   BackwardTest::run(sm80_kernels(), in, how));
    }
  }
}

TEST_F(BackwardSm90, WiderHeadsAreThePortableOnes) {
  EXPECT_TRUE(sm90_gradient::takes(testing::make_shape(1, 1, 128, 128)));
  for (const auto& [dim, value_dim] : {std::pair{129, 16}, {16, 129}}) {
    const AttentionShape shape = testing::make_shape(1, 1, dim, value_dim);
    EXPECT_FALSE(sm90_gradient::takes(shape));
    const GradientInputs in = causal_inputs(shape, 40, 70, DType::bf16);
    expect_equal(BackwardTest::run(behind_portable_forward(), in, {.key_chunk = 40}),
                 BackwardTest::run(sm80_kernels(), in, {.key_chunk = 40}));
  }
}

TEST_F(BackwardSm90, BlocksAreAsManyAsWorkAtATime) {
  const GradientInputs in = causal_inputs(testing::make_shape(4, 2, 16, 16), 140, 150, DType::f16);
  // 2 tiles of 128 keys x 2 heads; 2 tiles of 128 rows x 4 heads.
  expect_blocks(sm90_kernels(), in, {.dkv = 4, .dq = 8}, run(in, {.num_threads = 1}));
}

TEST_F(BackwardSm90, StepsChangeNothing) {
  const GradientInputs in = causal_inputs(testing::make_shape(2, 1, 24, 16), 200, 270, DType::bf16);
  for (const bool continues : {false, true}) {
    const GradientRun how{.row_chunk = 80, .key_chunk = 130, .continues = continues};
    expect_steps_change_nothing(sm90_kernels(), in, how, run(in, how));
  }
}

/// Rows of 200 that see key 130 but not key 190, and so on: special numbers in several channels of
/// one tile, decided by different rows, on both sides of the border between the consumers.
TEST_F(BackwardSm90, SpecialNumbersReachThoseWhoSeeThemAndNobodyElse) {
  const GradientInputs clean = testing::random_gradient_inputs(
      testing::make_shape(1, 1, 72, 16), 200, 200, {MaskKind::causal, 1}, DType::bf16, 5);
  const Gradients expected = run(clean, {});
  GradientInputs bad_keys = clean;
  bad_keys.k.set(130, 0, 5, kNan);
  bad_keys.k.set(150, 0, 5, kInf);
  bad_keys.k.set(190, 0, 70, kNan);
  GradientInputs bad_rows = clean;
  bad_rows.dout.set(20, 0, 3, kNan);
  bad_rows.dout.set(50, 0, 15, kNan);
  bad_rows.dout.set(140, 0, 3, kNan);
  in_all_modes([&] {
    const Gradients keys = run(bad_keys, {});
    for (std::int64_t row = 0; row < 200; ++row) {
      for (const std::int64_t d : {0, 5, 70, 71}) {
        if (row >= 130) {
          EXPECT_TRUE(std::isnan(keys.dq.at(row, 0, d))) << row << ", " << d;
        } else {
          ASSERT_EQ(keys.dq.bits_at(row, 0, d), expected.dq.bits_at(row, 0, d)) << row << ", " << d;
        }
      }
    }
    const Gradients rows = run(bad_rows, {});
    for (std::int64_t key = 0; key < 200; ++key) {
      for (std::int64_t d = 0; d < 16; ++d) {
        const bool sees = (d == 3 && key <= 140) || (d == 15 && key <= 50);
        if (sees) {
          EXPECT_TRUE(std::isnan(rows.dv.at(key, 0, d))) << key << ", " << d;
        } else {
          ASSERT_EQ(rows.dv.bits_at(key, 0, d), expected.dv.bits_at(key, 0, d)) << key << ", " << d;
        }
      }
      if (key <= 140) {
        EXPECT_TRUE(std::isnan(rows.dk.at(key, 0, 7))) << key;
      } else {
        ASSERT_EQ(rows.dk.bits_at(key, 0, 7), expected.dk.bits_at(key, 0, 7)) << key;
      }
    }
  });
}

TEST_F(BackwardSm90, WhatCannotBeRunIsRefused) {
  const GradientInputs in = causal_inputs(testing::make_shape(1, 1, 16, 16), 20, 20, DType::bf16);
  expect_refusals(sm90_gradient::backward, sm90_kernels(), in);
}

}  // namespace
}  // namespace cpattn::cuda
