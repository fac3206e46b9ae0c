#include "launch/lane_result.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "launch/job_files.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// 2 query heads, 1 kv head, D = 3, Dv = 4.
Problem problem_of(std::int64_t q_rows, std::int64_t kv_rows, DType dtype) {
  return {.shape = {.num_heads = 2, .num_kv_heads = 1, .head_dim = 3, .value_dim = 4},
          .batch = batch_of_one(q_rows, kv_rows),
          .dtype = dtype,
          .out_dtype = DType::f32};
}

TEST(LaneResult, HoldsTheTensorsOfItsDirection) {
  const LaneResult forward = make_lane_result(problem_of(5, 7, DType::bf16), false);
  const LaneResult both = make_lane_result(problem_of(5, 7, DType::bf16), true);

  EXPECT_EQ(forward.tensors.size(), 2u);
  EXPECT_EQ(forward.find(ResultRole::dq), nullptr);
  ASSERT_EQ(both.tensors.size(), EnumNames<ResultRole>::kValues.size());
  using Shape = std::array<std::int64_t, 3>;
  EXPECT_EQ(both.find(ResultRole::out)->shape, (Shape{5, 2, 4}));
  EXPECT_EQ(both.find(ResultRole::out)->dtype, DType::f32);
  EXPECT_EQ(both.find(ResultRole::lse)->shape, (Shape{5, 2, 1}));
  EXPECT_EQ(both.find(ResultRole::dq)->shape, (Shape{5, 2, 3}));
  EXPECT_EQ(both.find(ResultRole::dq)->dtype, DType::bf16);
  EXPECT_EQ(both.find(ResultRole::dk)->shape, (Shape{7, 1, 3}));
  EXPECT_EQ(both.find(ResultRole::dv)->shape, (Shape{7, 1, 4}));
}

TEST(LaneResult, IsNaNUntilDelivered) {
  const LaneResult result = make_lane_result(problem_of(3, 5, DType::f16), true);

  for (const ResultTensor& tensor : result.tensors) {
    const std::int64_t elements = tensor.shape[0] * tensor.shape[1] * tensor.shape[2];
    for (std::int64_t i = 0; i < elements; ++i)
      EXPECT_TRUE(std::isnan(load_as_float(tensor.memory.data(), tensor.dtype, i)));
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(result.deliveries(false)[i], 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(result.deliveries(true)[i], 0);
}

TEST(LaneResult, SurvivesTheFile) {
  const PrivateDirectory directory;
  const std::string path = directory.path() + "/lane0.result";
  LaneResult result = make_lane_result(problem_of(2, 3, DType::bf16), true);
  float value = 0.5f;
  for (const ResultTensor& tensor : result.tensors) {
    for (std::int64_t row = 0; row < tensor.shape[0]; ++row)
      store_from_float(tensor.view().row(row, 0), tensor.dtype, 0, value *= 1.5f);
  }
  result.find(ResultRole::lse)->memory.as<float>()[0] = -std::numeric_limits<float>::infinity();
  result.deliveries(false)[1] = 1;
  result.deliveries(true)[2] = 7;
  result.ranks.push_back({.rank = 3,
                          .host = "h",
                          .pid = 9,
                          .rows = 2,
                          .seconds = 0.25,
                          .backward_seconds = 0.125,
                          .fault_sites = 5});
  result.problems = {"a problem"};
  result.guarantee = std::string("bitwise across CP sizes");

  save_result(path, result);
  const auto loaded = load_result(path);

  ASSERT_TRUE(loaded.has_value());
  ASSERT_EQ(loaded->tensors.size(), result.tensors.size());
  for (std::size_t i = 0; i < result.tensors.size(); ++i) {
    const ResultTensor& saved = result.tensors[i];
    EXPECT_EQ(loaded->tensors[i].role, saved.role);
    EXPECT_EQ(loaded->tensors[i].dtype, saved.dtype);
    ASSERT_EQ(loaded->tensors[i].shape, saved.shape);
    EXPECT_EQ(std::memcmp(loaded->tensors[i].memory.data(), saved.memory.data(), saved.bytes()), 0);
  }
  EXPECT_EQ(loaded->deliveries(false)[1], 1);
  EXPECT_EQ(loaded->deliveries(true)[2], 7);
  EXPECT_EQ(loaded->ranks[0].fault_sites, 5);
  EXPECT_EQ(loaded->ranks[0].seconds, 0.25);
  EXPECT_EQ(loaded->ranks[0].backward_seconds, 0.125);
  EXPECT_EQ(loaded->problems, result.problems);
  EXPECT_FALSE(load_result(path + ".other").has_value());
}

TEST(LaneResult, AShortFileIsNotAResult) {
  const PrivateDirectory directory;
  const std::string path = directory.path() + "/lane0.result";
  save_result(path, make_lane_result(problem_of(2, 1, DType::f32), true));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);

  EXPECT_THROW(load_result(path), InternalError);
}

}  // namespace
}  // namespace cpattn
