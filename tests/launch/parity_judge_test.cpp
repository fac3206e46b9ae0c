#include "launch/parity_judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "src/comm/loopback_comm.h"

namespace cpattn {
namespace {

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
      result = run_lane({config_, *inputs_[0], lanes_of(config_)[0], std::nullopt}, world,
                        ShardPlace::on_cpu(config_));
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
  EXPECT_EQ(report.compared_elements(), 100 * 2 * (8 + 1) + 100 * 2 * 8 + 2 * 100 * 8);
  std::vector<std::string> names;
  for (const TensorReport& tensor : report.tensors) {
    names.push_back(tensor.name);
    EXPECT_TRUE(tensor.passes);
    EXPECT_EQ(tensor.reference_rows, 100);
    EXPECT_GT(tensor.rel_l2, 0.0);
    EXPECT_LE(tensor.worst_rel_l2, tensor.bound);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"out", "lse", "dq", "dk", "dv"}));
}

TEST_F(JudgeTest, ComparesWhatTheDirectionAsksFor) {
  judge_->set_baseline(0, run());
  config_.direction = Direction::backward;
  const LaneReport backward = judge_->judge(0, 1, run());
  config_.direction = Direction::forward;
  judge_.emplace(config_, inputs_, 1);
  judge_->set_baseline(0, run());
  const LaneReport forward = judge_->judge(0, 1, run());

  EXPECT_EQ(backward.status, LaneStatus::passed);
  EXPECT_EQ(backward.compared_elements(), 100 * 2 * 8 + 2 * 100 * 8);
  EXPECT_EQ(forward.status, LaneStatus::passed);
  EXPECT_EQ(forward.compared_elements(), 100 * 2 * (8 + 1));
}

TEST_F(JudgeTest, WithoutABaselineNothingPasses) {
  const LaneReport report = judge_->judge(0, 1, run());

  // The run that should have given it failed, and that is the exit code; nothing here differs.
  EXPECT_EQ(report.status, LaneStatus::not_evaluated);
  EXPECT_EQ(report.failure, FailureKind::none);
  EXPECT_EQ(report.compared_elements(), 0);
  EXPECT_EQ(report.reasons.size(), 1u);
}

TEST_F(JudgeTest, ATensorThatIsMissingFails) {
  judge_->set_baseline(0, run());
  LaneResult result = run();
  result.tensors.pop_back();

  const LaneReport report = judge_->judge(0, 1, result);

  EXPECT_EQ(report.status, LaneStatus::failed);
  EXPECT_EQ(report.reasons, (std::vector<std::string>{"dv was not delivered"}));
}

TEST_F(JudgeTest, SeesARowThatWasDeliveredTwiceOrNever) {
  judge_->set_baseline(0, run());
  LaneResult twice = run();
  twice.deliveries(false)[7] = 2;
  LaneResult never = run();
  never.deliveries(true)[99] = 0;

  EXPECT_EQ(judge_->judge(0, 1, twice).reasons.at(0),
            "1 row was not delivered exactly once, first row 7 (2 times)");
  EXPECT_EQ(judge_->judge(0, 1, never).reasons.at(0),
            "1 key row was not delivered exactly once, first row 99 (0 times)");
}

TEST_F(JudgeTest, SeesARankThatDidNotDeliver) {
  judge_->set_baseline(0, run());

  const LaneReport report = judge_->judge(0, 2, run());

  EXPECT_EQ(report.status, LaneStatus::failed);
  EXPECT_EQ(report.reasons.at(0), "1 of 2 ranks delivered");
}

TEST_F(JudgeTest, SeesOneWrongBitInAnyTensor) {
  judge_->set_baseline(0, run());
  for (const auto& [role, name] : EnumNames<ResultRole>::kValues) {
    LaneResult result = run();
    const ResultTensor& tensor = *result.find(role);
    const std::int64_t heads = tensor.shape[1], dim = tensor.shape[2];
    tensor.memory.as<std::uint32_t>()[(5 * heads + heads - 1) * dim] ^= 1;

    const LaneReport report = judge_->judge(0, 1, result);

    EXPECT_EQ(report.bit_mismatch(), 1);
    ASSERT_EQ(report.reasons.size(), 1u);
    EXPECT_TRUE(report.reasons[0].starts_with(
        std::string(name) + ": 1 of " + std::to_string(100 * heads * dim) +
        " elements differ in bits from the single-rank run, first at row 5 head " +
        std::to_string(heads - 1) + " channel 0: "))
        << report.reasons[0];
    EXPECT_EQ(report.failure, FailureKind::differs);
    EXPECT_EQ(report.worst()->name, name);
    for (const TensorReport& other : report.tensors) EXPECT_EQ(other.passes, other.name != name);
  }
}

/// A gradient that is wrong in every way that gradients have been wrong in, at the bounds that
/// parity ships; the single-rank run is wrong alike, so that only the reference can tell.
TEST_F(JudgeTest, BC_098_BC_099_BC_104_SeesGradientsThatAreWrongEverywhere) {
  const auto judge_changed = [&](ResultRole role, auto&& change) {
    LaneResult result = run();
    LaneResult same = run();
    change(result.find(role)->memory.as<float>());
    change(same.find(role)->memory.as<float>());
    judge_->set_baseline(0, std::move(same));
    const LaneReport report = judge_->judge(0, 1, result);
    EXPECT_EQ(report.bit_mismatch(), 0);
    return report.status;
  };
  for (const ResultRole role : {ResultRole::dq, ResultRole::dk, ResultRole::dv}) {
    const std::int64_t row = role == ResultRole::dq ? 2 * 8 : 8;
    EXPECT_EQ(judge_changed(role, [](float*) {}), LaneStatus::passed);
    EXPECT_EQ(judge_changed(role, [&](float* x) { std::fill_n(x + 50 * row, 50 * row, 0.0f); }),
              LaneStatus::failed);
    EXPECT_EQ(judge_changed(role, [&](float* x) { x[50 * row] = NAN; }), LaneStatus::failed);
    EXPECT_EQ(judge_changed(role, [&](float* x) { std::rotate(x, x + row, x + 100 * row); }),
              LaneStatus::failed);
    for (const float factor : {1.1f, 1.05f, 1.0001f})
      EXPECT_EQ(judge_changed(role,
                              [&](float* x) {
                                for (std::int64_t i = 0; i < 100 * row; ++i) x[i] *= factor;
                              }),
                LaneStatus::failed)
          << factor;
  }
}

}  // namespace
}  // namespace cpattn
