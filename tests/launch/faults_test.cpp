#include "launch/faults.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
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

  EXPECT_EQ(what_fault_needs(FaultKind::hop_dropped, {lane, Direction::both, 2, info}), "");
  EXPECT_NE(what_fault_needs(FaultKind::hop_dropped, {lane, Direction::both, 1, info}), "");
  EXPECT_NE(what_fault_needs(FaultKind::rank_never_answers, {lane, Direction::both, 1, info}), "");
  lane.sharding = ShardingKind::contiguous;
  EXPECT_NE(what_fault_needs(FaultKind::zigzag_wrong_half, {lane, Direction::both, 2, info}), "");
  lane.mask = MaskKind::full;
  EXPECT_NE(what_fault_needs(FaultKind::causal_off_by_one, {lane, Direction::both, 2, info}), "");
  info.shape.num_kv_heads = 1;
  EXPECT_NE(what_fault_needs(FaultKind::kv_head_map_wrong, {lane, Direction::both, 2, info}), "");
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

/// A rank's results, all ones.
std::vector<ResultTensor> ones(const Plan& plan) {
  auto results =
      make_result_tensors(plan.problem(), true, plan.shard().q_rows, plan.shard().kv_rows);
  for (const ResultTensor& tensor : results)
    for (std::int64_t i = 0; i < tensor.shape[0] * tensor.shape[1] * tensor.shape[2]; ++i)
      store_from_float(tensor.memory.data(), tensor.dtype, i, 1.0f);
  return results;
}

const ResultTensor& find(const std::vector<ResultTensor>& results, ResultRole role) {
  return results[static_cast<std::size_t>(role)];
}

TEST(Faults, OnlyTheLastRankWithRowsSpoilsItsResults) {
  for (const int rank : {0, 1}) {
    const Plan plan = plan_of(small_config(), rank, 2);
    const auto results = ones(plan);
    Fault fault(FaultKind::nan_row);

    fault.plant_in_results(plan, results);

    const auto* out = find(results, ResultRole::out).memory.as<float>();
    EXPECT_EQ(fault.sites(), rank);
    EXPECT_EQ(std::isnan(out[0]), rank == 1);
    EXPECT_FALSE(std::isnan(out[4 * 8]));
  }
}

TEST(Faults, OneChunkOfDkIsZeroed) {
  const Plan plan = plan_of(small_config(), 1, 2);
  const auto results = ones(plan);
  Fault fault(FaultKind::dk_chunk_zeroed);

  fault.plant_in_results(plan, results);

  const ResultTensor& dk = find(results, ResultRole::dk);
  EXPECT_EQ(fault.sites(), 32);
  EXPECT_EQ(std::count(dk.memory.as<float>(), dk.memory.as<float>() + dk.bytes() / 4, 0.0f),
            32 * 2 * 8);
  const ResultTensor& dv = find(results, ResultRole::dv);
  EXPECT_EQ(std::count(dv.memory.as<float>(), dv.memory.as<float>() + dv.bytes() / 4, 0.0f), 0);
}

TEST(Faults, DqMovesToTheNextHeadGroup) {
  const Plan plan = plan_of(small_config(), 0, 2);
  const auto results = ones(plan);
  const AnyTensor dq = find(results, ResultRole::dq).view();
  for (std::int64_t head = 0; head < 4; ++head)
    store_from_float(dq.row(5, head), dq.dtype, 3, static_cast<float>(head));
  Fault fault(FaultKind::dq_head_group_wrong);

  fault.plant_in_results(plan, results);

  EXPECT_EQ(fault.sites(), plan.shard().q_rows);
  for (std::int64_t head = 0; head < 4; ++head)  // groups of two heads
    EXPECT_EQ(load_as_float(dq.row(5, head), dq.dtype, 3), static_cast<float>((head + 2) % 4));
}

/// (sums, copies) of the folds of a schedule.
std::pair<std::int64_t, std::int64_t> fold_counts(const GradientPlan& plan) {
  std::pair<std::int64_t, std::int64_t> counts;
  for (const FoldOp& op : plan.schedule().folds) {
    counts.first += op.kind == DkvOpKind::sum ? 1 : 0;
    counts.second += op.kind == DkvOpKind::copy ? 1 : 0;
  }
  return counts;
}

TEST(Faults, APieceIsDroppedOrAddedTwice) {
  const Plan plan = plan_of(small_config(), 0, 2);
  const GradientPlan original(plan);
  GradientPlan dropped(plan);
  GradientPlan doubled(plan);
  Fault drop(FaultKind::dkv_piece_dropped);
  Fault twice(FaultKind::dkv_piece_added_twice);

  drop.plant(dropped);
  twice.plant(doubled);

  EXPECT_EQ(drop.sites(), 1);
  EXPECT_EQ(twice.sites(), 1);
  const auto [sums, copies] = fold_counts(original);
  EXPECT_EQ(fold_counts(dropped), std::pair(sums - 1, copies + 1));
  EXPECT_EQ(fold_counts(doubled), std::pair(sums + 1, copies));
  // Steps still hold all folds, one after the other.
  std::int64_t end = 0;
  for (const GradientStep& step : doubled.schedule().steps) {
    EXPECT_EQ(step.fold_begin, end);
    end = step.fold_end;
  }
  EXPECT_EQ(end, static_cast<std::int64_t>(doubled.schedule().folds.size()));
}

TEST(Faults, APartialOutSeesNoKeyAfterTheFirstHop) {
  Plan plan = plan_of(small_config(), 1, 2);
  Fault fault(FaultKind::delta_from_partial_out);

  EXPECT_TRUE(fault.believes_partial_out());
  fault.blind_all_hops(plan);

  EXPECT_GT(fault.sites(), 0);
  const Schedule& schedule = plan.schedule();
  for (const ChunkProgram& program : schedule.steps[1].programs)
    for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
      const StateOp& op = schedule.ops[static_cast<std::size_t>(i)];
      if (op.kind == StateOpKind::block) {
        EXPECT_EQ(op.mask.visible_keys(31, 32), 0);
      }
    }
}

TEST(Faults, ThoseOfTheBackwardNeedIt) {
  const RunConfig config = small_config();
  const LaneConfig lane = lanes_of(config)[0];
  const InputInfo info = info_of(config);
  for (const FaultKind kind :
       {FaultKind::dk_chunk_zeroed, FaultKind::dkv_piece_dropped, FaultKind::dkv_piece_added_twice,
        FaultKind::delta_from_partial_out, FaultKind::gradients_rounded_per_hop,
        FaultKind::dq_head_group_wrong}) {
    EXPECT_EQ(what_fault_needs(kind, {lane, Direction::both, 2, info}), "");
    EXPECT_EQ(what_fault_needs(kind, {lane, Direction::backward, 2, info}), "");
    EXPECT_EQ(what_fault_needs(kind, {lane, Direction::forward, 2, info}),
              "needs a direction with gradients");
  }
  EXPECT_NE(what_fault_needs(FaultKind::dkv_piece_dropped, {lane, Direction::both, 1, info}), "");
  EXPECT_NE(what_fault_needs(FaultKind::bit_flip, {lane, Direction::backward, 2, info}), "");
}

}  // namespace
}  // namespace cpattn
