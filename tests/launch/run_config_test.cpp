#include "launch/run_config.h"

#include <gtest/gtest.h>

#include "cp/plan.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

TEST(RunConfig, LanesAreEveryCombinationOnce) {
  RunConfig config;
  config.mask = {MaskKind::causal, MaskKind::full};
  config.sharding = {ShardingKind::contiguous, ShardingKind::zigzag};
  config.dtype = {DType::f32, DType::bf16};

  const auto lanes = lanes_of(config);

  ASSERT_EQ(lanes.size(), 8u);
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    for (std::size_t j = i + 1; j < lanes.size(); ++j) {
      EXPECT_FALSE(lanes[i].mask == lanes[j].mask && lanes[i].sharding == lanes[j].sharding &&
                   lanes[i].schedule == lanes[j].schedule && lanes[i].dtype == lanes[j].dtype)
          << i << " and " << j;
    }
  }
}

TEST(RunConfig, ALaneReplacesWhatItNamesAndKeepsTheRest) {
  RunConfig config;
  config.cp_config.chunk_tokens = 64;
  config.cp_config.verify_checksum = true;

  const CpConfig result = cp_config_of(
      config, {MaskKind::full, ShardingKind::contiguous, ScheduleKind::arrival, DType::f16});

  EXPECT_EQ(result.mask, MaskKind::full);
  EXPECT_EQ(result.sharding, ShardingKind::contiguous);
  EXPECT_EQ(result.schedule, ScheduleKind::arrival);
  EXPECT_EQ(result.chunk_tokens, 64);
  EXPECT_TRUE(result.verify_checksum);
}

TEST(RunConfig, EveryKnobOfCpConfigIsAKnobOfTheRun) {
  RunConfig config;
  CpConfig cp_config;

  for_each_cp_field(cp_config, [&](const FieldInfo& wanted, auto&) {
    int times = 0;
    for_each_run_field(config, [&](const RunField& field, auto&) {
      if (field.name != wanted.name) return;
      ++times;
      EXPECT_EQ(field.help, wanted.help);
      EXPECT_EQ(field.scope, wanted.scope);
    });
    EXPECT_EQ(times, 1) << wanted.name;
  });
}

TEST(RunConfig, SyntheticLengthsComeFromOneKnobAtATime) {
  RunConfig config;
  config.seq_len = 5;
  EXPECT_EQ(synthetic_batch(config).kv_rows, 5);
  config.kv_len = 0;
  EXPECT_EQ(synthetic_batch(config).q_rows, 5);
  EXPECT_EQ(synthetic_batch(config).kv_rows, 0);

  config.cu_seqlens = {0, 3, 3, 7};
  config.cu_seqlens_kv = {0, 1, 4, 4};
  const SequenceBatch batch = synthetic_batch(config);

  ASSERT_EQ(batch.documents.size(), 3u);
  EXPECT_EQ(batch.q_rows, 7);
  EXPECT_EQ(batch.kv_rows, 4);
  EXPECT_EQ(batch.documents[1].q_tokens, 0);
  EXPECT_EQ(batch.documents[1].kv_tokens, 3);
}

TEST(RunConfig, ScaleZeroAndNegativeAreValuesAndAutoIsTheUsual) {
  RunConfig config;
  config.seq_len = 4;
  config.head_dim = 16;
  config.value_dim = 8;
  const auto inputs = open_inputs(config);
  ASSERT_EQ(inputs.size(), 1u);
  const LaneConfig lane = lanes_of(config).front();
  const auto scale_of = [&](const char* text) {
    config.softmax_scale = text;
    return problem_of(config, lane, inputs[0]->info()).shape.softmax_scale;
  };

  EXPECT_EQ(scale_of("auto"), 0.25);
  EXPECT_EQ(scale_of("0"), 0.0);
  EXPECT_EQ(scale_of("-2.5"), -2.5);
  EXPECT_EQ(inputs[0]->info().shape.value_dim, 8);
}

TEST(RunConfig, OutTypeSameFollowsTheLane) {
  RunConfig config;
  config.dtype = {DType::bf16};
  const auto inputs = open_inputs(config);
  const LaneConfig lane = lanes_of(config).front();

  EXPECT_EQ(problem_of(config, lane, inputs[0]->info()).out_dtype, DType::f32);
  config.out_dtype = "same";
  EXPECT_EQ(problem_of(config, lane, inputs[0]->info()).out_dtype, DType::bf16);
  config.out_dtype = "f16";
  EXPECT_EQ(problem_of(config, lane, inputs[0]->info()).out_dtype, DType::f16);
}

TEST(RunConfig, IsaIsTakenOrRefusedByName) {
  RunConfig config;
  EXPECT_EQ(&kernels_of(config), &default_kernels());
  const KernelTable& first = *available_kernels().front();
  config.isa = name_of(first.isa);
  EXPECT_EQ(&kernels_of(config), &first);
  config.isa = first.isa == Isa::neon ? "avx2" : "neon";
  EXPECT_THROW(kernels_of(config), Unsupported);
  config.isa = "sse9";
  EXPECT_THROW(kernels_of(config), InvalidArgument);
}

}  // namespace
}  // namespace cpattn
