#include "launch/parity_judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "src/comm/loopback_comm.h"

namespace cpattn {
namespace {

std::vector<OwnedChunk> chunks_of(std::int64_t tokens, std::int64_t chunk_tokens) {
  std::vector<OwnedChunk> chunks;
  for (std::int64_t first = 0; first < tokens; first += chunk_tokens) {
    OwnedChunk chunk;
    chunk.first = first;
    chunk.row_begin = first;
    chunk.num_tokens = std::min(chunk_tokens, tokens - first);
    chunks.push_back(chunk);
  }
  return chunks;
}

TEST(ChooseReferenceRows, TakesAllRowsThatFitTheBudget) {
  const auto rows = choose_reference_rows(chunks_of(100, 32), 1e6, 1e6, 0);

  EXPECT_EQ(rows.size(), 100u);
}

TEST(ChooseReferenceRows, SpreadsWhatFitsFromTheFirstRowToTheLast) {
  const auto rows = choose_reference_rows(chunks_of(1000, 100), 1e9, 1e8, 0);

  EXPECT_EQ(rows.size(), 100u);
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 999);
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
  EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end());
  for (const std::int64_t edge : {99, 100, 499, 500}) {
    EXPECT_TRUE(std::binary_search(rows.begin(), rows.end(), edge)) << edge;
  }
}

TEST(ChooseReferenceRows, TakesTheNumberAskedFor) {
  EXPECT_EQ(choose_reference_rows(chunks_of(1000, 100), 1e3, 1e9, 10).size(), 10u);
  EXPECT_EQ(choose_reference_rows(chunks_of(10, 100), 1e9, 1.0, 5000).size(), 10u);
}

TEST(BaselineSpecs, AreSharedByShardings) {
  RunConfig config;
  config.sharding = {ShardingKind::contiguous, ShardingKind::zigzag};
  config.mask = {MaskKind::causal, MaskKind::full};
  const auto lanes = lane_specs(config, 2);
  const auto baselines = baseline_specs(config, 2);

  EXPECT_EQ(lanes.size(), 8u);
  EXPECT_EQ(baselines.size(), 4u);
  for (const LaneSpec& lane : lanes) EXPECT_LT(baseline_index(baselines, lane), 4u);
}

/// A small run on one rank, with its judge.
class JudgeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.seq_len = 100;
    config_.heads = 2;
    config_.kv_heads = 1;
    config_.head_dim = 8;
    config_.cp_config.chunk_tokens = 32;
    config_.cp = {1};
    inputs_ = open_inputs(config_);
    judge_.emplace(config_, inputs_, 1);
  }

  LaneResult run() const {
    std::optional<LaneResult> result;
    LoopbackWorld(1).run([&](Communicator& comm) {
      World world{comm, 1};
      result = run_lane({config_, *inputs_[0], lanes_of(config_)[0], std::nullopt}, world);
    });
    return std::move(*result);
  }

  RunConfig config_;
  Inputs inputs_;
  std::optional<Judge> judge_;
};

TEST_F(JudgeTest, PassesARightResult) {
  judge_->set_baseline(0, run());

  const LaneReport report = judge_->judge(0, 1, run());

  EXPECT_EQ(report.status, LaneStatus::passed);
  EXPECT_TRUE(report.reasons.empty());
  EXPECT_EQ(report.compared_elements, 100 * 2 * (8 + 1));
  EXPECT_EQ(report.reference_rows, 100);
  EXPECT_GT(report.rel_l2, 0.0);
  EXPECT_LE(report.worst_rel_l2, report.rel_l2_bound);
}

TEST_F(JudgeTest, WithoutABaselineNothingPasses) {
  const LaneReport report = judge_->judge(0, 1, run());

  EXPECT_EQ(report.status, LaneStatus::failed);
  EXPECT_EQ(report.compared_elements, 0);
}

TEST_F(JudgeTest, SeesARowThatWasDeliveredTwiceOrNever) {
  judge_->set_baseline(0, run());
  LaneResult twice = run();
  twice.deliveries.as<unsigned char>()[7] = 2;
  LaneResult never = run();
  never.deliveries.as<unsigned char>()[99] = 0;

  EXPECT_EQ(judge_->judge(0, 1, twice).reasons.at(0),
            "1 row was not delivered exactly once, first row 7 (2 times)");
  EXPECT_EQ(judge_->judge(0, 1, never).status, LaneStatus::failed);
}

TEST_F(JudgeTest, SeesARankThatDidNotDeliver) {
  judge_->set_baseline(0, run());

  const LaneReport report = judge_->judge(0, 2, run());

  EXPECT_EQ(report.status, LaneStatus::failed);
  EXPECT_EQ(report.reasons.at(0), "1 of 2 ranks delivered");
}

TEST_F(JudgeTest, SeesOneWrongBitInLse) {
  judge_->set_baseline(0, run());
  LaneResult result = run();
  result.lse.as<std::uint32_t>()[11] ^= 1;

  const LaneReport report = judge_->judge(0, 1, result);

  EXPECT_EQ(report.bit_mismatch, 1);
  EXPECT_TRUE(report.first_difference.starts_with("lse row 5 head 1 channel 0"));
  EXPECT_EQ(report.failure, FailureKind::differs);
}

}  // namespace
}  // namespace cpattn
