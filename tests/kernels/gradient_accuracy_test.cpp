// The backward kernels against gradients in double, within a bound derived for every element.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/attention_case.h"
#include "tests/support/every_table.h"
#include "tests/support/run_gradient.h"

namespace cpattn::testing {
namespace {

void expect_accurate(const GradientInputs& in, const GradientRun& run = {}) {
  for (const KernelTable* table : tested().tables) {
    SCOPED_TRACE(std::string(table->name) + " " + std::string(name_of(in.q.dtype())));
    const BoundedGradients expected = bounded_gradients(in, table->numerics(in.q.dtype()));
    const Gradients actual = run_gradient(*table, in, run);
    EXPECT_TRUE(expected.dq.accepts(actual.dq)) << "dq";
    EXPECT_TRUE(expected.dk.accepts(actual.dk)) << "dk";
    EXPECT_TRUE(expected.dv.accepts(actual.dv)) << "dv";
  }
}

bool tests_cpu() { return tested().tables.front()->device == DeviceKind::cpu; }

BlockMask causal(std::int64_t rows, std::int64_t keys) {
  return {MaskKind::causal, 1 + keys - rows};
}

TEST(GradientAccuracy, Lengths) {
  struct Sizes {
    std::vector<std::int64_t> rows, keys;
  };
  const Sizes of_cpu{{1, 7, 47, 48, 49, 130}, {1, 7, 127, 128, 129, 300}};
  const Sizes of_cuda{{1, 33, 63, 64, 129}, {1, 31, 64, 65, 129}};
  const Sizes& sizes = tests_cpu() ? of_cpu : of_cuda;
  const AttentionShape shape = make_shape(2, 1, 40, 24);
  for (const DType dtype : tested().dtypes) {
    if (tests_cpu() && dtype != DType::f32) continue;  // they differ in what they read only
    for (const std::int64_t rows : sizes.rows) {
      for (const std::int64_t keys : sizes.keys) {
        SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(keys) + " keys");
        expect_accurate(random_gradient_inputs(shape, rows, keys, {}, dtype, 1));
        expect_accurate(random_gradient_inputs(shape, rows, keys, causal(rows, keys), dtype, 2));
      }
    }
  }
}

TEST(GradientAccuracy, HeadsAndDims) {
  struct Dims {
    std::int64_t heads, kv_heads, head_dim, value_dim;
  };
  for (const Dims& dims :
       {Dims{1, 1, 1, 1}, Dims{6, 2, 3, 17}, Dims{4, 4, 15, 8}, Dims{3, 1, 64, 33},
        Dims{2, 1, 127, 65}, Dims{2, 2, 96, 128}, Dims{1, 1, 255, 9}, Dims{2, 1, 256, 256}}) {
    SCOPED_TRACE(std::to_string(dims.head_dim) + ", " + std::to_string(dims.value_dim));
    const AttentionShape shape =
        make_shape(dims.heads, dims.kv_heads, dims.head_dim, dims.value_dim);
    for (const DType dtype : tested().dtypes) {
      expect_accurate(random_gradient_inputs(shape, 53, 75, causal(53, 75), dtype, 3));
    }
  }
}

TEST(GradientAccuracy, LimitsOfAllKinds) {
  const AttentionShape shape = make_shape(2, 1, 16, 16);
  for (const std::int64_t limit : {-1000, -51, -48, -1, 0, 1, 2, 80, 128, 149, 150, 1000}) {
    SCOPED_TRACE(limit);
    const BlockMask mask{MaskKind::causal, limit};
    for (const DType dtype : tested().dtypes) {
      const GradientInputs in = random_gradient_inputs(shape, 52, 150, mask, dtype, 4);
      expect_accurate(in);
      expect_accurate(in, {.row_chunk = 20, .key_chunk = 60});
    }
  }
}

TEST(GradientAccuracy, GradientOfLse) {
  for (const DType dtype : tested().dtypes) {
    GradientInputs in =
        random_gradient_inputs(make_shape(4, 2, 32, 16), 60, 140, causal(60, 140), dtype, 5);
    for (std::int64_t i = 0; i < 60 * 4; ++i)
      in.dlse.push_back(random_normal(9, static_cast<std::uint64_t>(i)));
    expect_accurate(in, {.row_chunk = 32, .key_chunk = 50});
  }
}

TEST(GradientAccuracy, ScalesOfAllSigns) {
  for (const double scale : {0.0, -0.0, -0.3, 1.0, -2.0, 1e-30}) {
    SCOPED_TRACE(scale);
    AttentionShape shape = make_shape(2, 1, 24, 24);
    shape.softmax_scale = scale;
    for (const DType dtype : tested().dtypes)
      expect_accurate(random_gradient_inputs(shape, 50, 70, causal(50, 70), dtype, 6));
  }
}

TEST(GradientAccuracy, LargeLogits) {
  for (const DType dtype : tested().dtypes) {
    for (const float size : {10.0f, 100.0f}) {
      GradientInputs in =
          random_gradient_inputs(make_shape(2, 1, 64, 32), 60, 100, causal(60, 100), dtype, 7);
      in.q.fill_normal(70, size);
      in.k.fill_normal(71, size);
      expect_accurate(in);
    }
  }
}

TEST(GradientAccuracy, OutOfAnotherType) {
  GradientInputs in =
      random_gradient_inputs(make_shape(2, 1, 32, 32), 60, 100, causal(60, 100), DType::bf16, 8);
  in.out_dtype = DType::f32;
  in.dout = HostTensor(DType::f32, in.dout.shape()).fill_normal(11);
  expect_accurate(in);
}

}  // namespace
}  // namespace cpattn::testing
