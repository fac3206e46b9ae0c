#include "launch/faults.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "launch/parity_lane.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

RunConfig small_config() {
  RunConfig config;
  config.seq_len = 256;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.cp_config.chunk_tokens = 32;
  config.cp_config.threads = 1;
  return config;
}

Plan plan_of(const RunConfig& config, int rank, int size) {
  const Inputs inputs = open_inputs(config);
  const LaneConfig lane = lanes_of(config)[0];
  return Plan(problem_of(config, lane, inputs[0]->info()), cp_config_of(config, lane),
              find_kernels(available_kernels()[0]->isa), rank, size);
}

InputInfo info_of(const RunConfig& config) { return open_inputs(config)[0]->info(); }

std::int64_t count_ops(const Plan& plan, StateOpKind kind) {
  std::int64_t count = 0;
  for (const StateOp& op : plan.schedule().ops) count += op.kind == kind ? 1 : 0;
  return count;
}

TEST(Faults, HaveDistinctNamesAndDescriptions) {
  std::set<std::string_view> texts;
  for (const auto& [kind, name] : EnumNames<FaultKind>::kValues) {
    texts.insert(name);
    texts.insert(description_of(kind));
    EXPECT_EQ(fault_from_option(std::string(name)), kind);
  }

  EXPECT_EQ(texts.size(), 2 * EnumNames<FaultKind>::kValues.size());
  EXPECT_EQ(fault_from_option(""), std::nullopt);
  EXPECT_THROW(fault_from_option("no_such_fault"), InvalidArgument);
}

TEST(Faults, SayWhatTheyNeed) {
  const RunConfig config = small_config();
  LaneConfig lane = lanes_of(config)[0];
  InputInfo info = info_of(config);

  EXPECT_EQ(what_fault_needs(FaultKind::hop_dropped, lane, 2, info), "");
  EXPECT_NE(what_fault_needs(FaultKind::hop_dropped, lane, 1, info), "");
  EXPECT_NE(what_fault_needs(FaultKind::rank_never_answers, lane, 1, info), "");
  lane.sharding = ShardingKind::contiguous;
  EXPECT_NE(what_fault_needs(FaultKind::zigzag_wrong_half, lane, 2, info), "");
  lane.mask = MaskKind::full;
  EXPECT_NE(what_fault_needs(FaultKind::causal_off_by_one, lane, 2, info), "");
  info.shape.num_kv_heads = 1;
  EXPECT_NE(what_fault_needs(FaultKind::kv_head_map_wrong, lane, 2, info), "");
}

TEST(Faults, WithoutOneNothingChanges) {
  const RunConfig config = small_config();
  const Plan original = plan_of(config, 1, 2);
  Plan plan = plan_of(config, 1, 2);
  Fault none;
  none.plant(plan);

  ASSERT_EQ(plan.schedule().ops.size(), original.schedule().ops.size());
  EXPECT_EQ(none.sites(), 0);
}

TEST(Faults, ADroppedHopSeesNoKeys) {
  Plan plan = plan_of(small_config(), 1, 2);
  Fault fault(FaultKind::hop_dropped);

  fault.plant(plan);

  EXPECT_GT(fault.sites(), 0);
  std::int64_t blind = 0;
  for (const StateOp& op : plan.schedule().ops) {
    const bool reads = op.kind == StateOpKind::block || op.kind == StateOpKind::accumulate;
    blind += reads && op.mask.visible_keys(31, 32) == 0 ? 1 : 0;
  }
  EXPECT_EQ(blind, fault.sites());
}

TEST(Faults, AHopMergedTwiceAddsOneMergePerBlock) {
  Plan plan = plan_of(small_config(), 1, 2);
  const std::int64_t merges = count_ops(plan, StateOpKind::merge);
  const std::int64_t blocks = count_ops(plan, StateOpKind::block);
  Fault fault(FaultKind::hop_merged_twice);

  fault.plant(plan);

  EXPECT_GT(fault.sites(), 0);
  EXPECT_EQ(count_ops(plan, StateOpKind::merge), merges + fault.sites());
  EXPECT_EQ(count_ops(plan, StateOpKind::block), blocks);
  for (const Step& step : plan.schedule().steps) {
    for (const ChunkProgram& program : step.programs) {
      EXPECT_LE(program.op_end, static_cast<std::int64_t>(plan.schedule().ops.size()));
    }
  }
}

TEST(Faults, ABorderMovesByOneToken) {
  RunConfig config = small_config();
  config.cu_seqlens = {0, 100, 256};
  Problem problem = problem_of(config, lanes_of(config)[0], info_of(config));
  Fault fault(FaultKind::cu_seqlens_off_by_one);

  fault.plant(problem);

  EXPECT_EQ(problem.batch.documents[0].q_tokens, 101);
  EXPECT_EQ(problem.batch.documents[1].q_begin, 101);
  EXPECT_EQ(problem.batch.documents[1].kv_tokens, 155);
  EXPECT_NO_THROW(validate(problem.batch));
}

TEST(Faults, KvHeadsAreRotated) {
  std::vector<float> values{1, 2, 3, 4, 5, 6};  // 1 row, 3 heads, 2 channels
  Fault fault(FaultKind::kv_head_map_wrong);

  fault.plant_in_kv(contiguous_tensor(static_cast<void*>(values.data()), DType::f32, {1, 3, 2}));

  EXPECT_EQ(values, (std::vector<float>{3, 4, 5, 6, 1, 2}));
}

TEST(Faults, OnlyTheLastRankWithRowsSpoilsItsResults) {
  for (const int rank : {0, 1}) {
    const Plan plan = plan_of(small_config(), rank, 2);
    std::vector<float> out(4 * 4 * 8, 1.0f);
    std::vector<float> lse(4 * 4, 1.0f);
    Fault fault(FaultKind::nan_row);

    fault.plant_in_results(plan,
                           contiguous_tensor(static_cast<void*>(out.data()), DType::f32, {4, 4, 8}),
                           contiguous_view(lse.data(), std::array<std::int64_t, 2>{4, 4}));

    EXPECT_EQ(fault.sites(), rank);
    EXPECT_EQ(std::isnan(out[0]), rank == 1);
    EXPECT_FALSE(std::isnan(out[4 * 8]));
  }
}

}  // namespace
}  // namespace cpattn
