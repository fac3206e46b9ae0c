#include "launch/run_config.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cpattn
