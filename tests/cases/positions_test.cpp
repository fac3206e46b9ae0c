// K23 positions: what RoPE rotates by, and what a token predicts, across shard borders.
#include <cmath>
#include <vector>

#include "cp/shard_tools.h"
#include "tests/cases/closed_form.h"

namespace cpattn::testing {
namespace {

/// Two channels turned by one radian per position; unrotated q and k are (1, 0), so the logit of a
/// pair is the cosine of its distance.
void rotate(HostTensor& tensor, std::span<const std::int64_t> positions) {
  for (std::size_t row = 0; row < positions.size(); ++row) {
    const auto angle = static_cast<double>(positions[row]);
    tensor.set(static_cast<std::int64_t>(row), 0, 0, static_cast<float>(std::cos(angle)));
    tensor.set(static_cast<std::int64_t>(row), 0, 1, static_cast<float>(std::sin(angle)));
  }
}

constexpr double kLse[8] = {1,        1.489484, 1.628140, 1.698542,
                            1.789443, 1.989804, 2.295182, 2.489191};

/// Every rank rotates its own rows by what the tools say; lse of each q row must be that of its
/// place in the report. Six digits are given there, and f32 adds n * 2^-24 to sums of n <= 8 terms.
void expect_report(const SequenceBatch& batch, const std::function<double(std::int64_t row)>& lse) {
  constexpr double kDigits = 5e-7, kRounding = 16 * 0x1p-24;
  for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
    for (const int world_size : {1, 2, 3})
      for (const std::int64_t chunk_tokens : {1, 2, 3}) {
        AttentionCase problem =
            make_case({1, 1, 2, 2, 1.0}, batch, test_config(MaskKind::causal, chunk_tokens));
        problem.config.sharding = sharding;
        problem.v.fill([](std::int64_t j, auto...) { return static_cast<float>(j); });
        LoopbackWorld(world_size).run([&](Communicator& comm) {
          const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                          comm.size());
          RankTensors rank(problem, plan.shard());
          const auto places = query_positions(batch, plan.shard().q);
          rotate(rank.q, places);
          rotate(rank.k, positions(plan.shard().kv));
          RingAttention(plan, comm).forward(rank.views());
          const auto rows = global_rows(plan.shard().q);
          for (std::size_t i = 0; i < rows.size(); ++i) {
            EXPECT_NEAR(rank.lse[i], lse(rows[i]), kDigits + kRounding)
                << name_of(sharding) << ", CP" << world_size << ", row " << rows[i];
            EXPECT_EQ(rank.q.at(static_cast<std::int64_t>(i), 0, 0),
                      static_cast<float>(std::cos(static_cast<double>(places[i]))));
          }
        });
      }
}

TEST(BC_106, RotationByThePositionInTheSequence) {
  expect_report(batch_of_one(8, 8), [](std::int64_t row) { return kLse[row]; });
}

// A later document begins again at 0; local positions would give lse[2] = 1.967544.
TEST(BC_106, EveryPackedDocumentBeginsAgain) {
  expect_report(pack({8, 3, 8}), [](std::int64_t row) {
    return kLse[row < 8 ? row : row < 11 ? row - 8 : row - 11];
  });
}

TEST(BC_106, TheLastRowOfTheReport) {
  AttentionCase problem =
      make_case({1, 1, 2, 2, 1.0}, batch_of_one(8, 8), test_config(MaskKind::causal, 2));
  const std::vector<std::int64_t> places{0, 1, 2, 3, 4, 5, 6, 7};
  rotate(problem.q, places);
  rotate(problem.k, places);
  problem.v.fill([](std::int64_t j, auto...) { return static_cast<float>(j); });
  EXPECT_NEAR(attend(problem, 2).out.at(7, 0, 0), 3.397075, 5e-7 + 16 * 0x1p-24 * 7);
}

// The second piece of a prompt: five queries over eight keys, rotated from 3 on.
TEST(BC_108, ALaterPieceIsRotatedByItsAbsolutePosition) {
  expect_report(batch_of_one(3, 3), [](std::int64_t row) { return kLse[row]; });
  expect_report(batch_of_one(5, 8), [](std::int64_t row) { return kLse[row + 3]; });
}

// The target of a shard's last token lies on another rank, and a document's last token has none.
TEST(K23, TargetsCrossShardBordersAndNotDocuments) {
  const SequenceBatch batch = pack({5, 0, 1, 6});
  const std::vector<std::int64_t> tokens{10, 11, 12, 13, 14, 20, 30, 31, 32, 33, 34, 35};
  const std::vector<std::int64_t> expected{11, 12, 13, 14, -100, -100, 31, 32, 33, 34, 35, -100};
  for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
    for (const int world_size : {1, 2, 3, 5}) {
      CpConfig config = test_config(MaskKind::causal, 1);
      config.sharding = sharding;
      std::vector<std::int64_t> found(12, 0);
      for (const Shard& shard : make_sharding(batch, config, world_size).shards) {
        const auto rows = global_rows(shard.q);
        const auto targets = next_token_targets(tokens, batch, shard.q);
        for (std::size_t i = 0; i < rows.size(); ++i)
          found[static_cast<std::size_t>(rows[i])] = targets[i];
      }
      EXPECT_EQ(found, expected) << name_of(sharding) << ", CP" << world_size;
    }
}

}  // namespace
}  // namespace cpattn::testing
