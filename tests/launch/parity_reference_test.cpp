#include "launch/parity_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

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

TEST(RowMaps, KnowBothSidesOfEveryDocument) {
  const SequenceBatch batch{{{0, 3, 2, 5}, {4, 2, 7, 0}}, 7, 9};
  const RowMaps maps = make_row_maps(batch, {.mask = MaskKind::causal, .chunk_tokens = 2});

  EXPECT_EQ(maps.q.rows, (std::vector<std::int64_t>{0, 1, 2, 4, 5}));
  EXPECT_EQ(maps.kv.rows, (std::vector<std::int64_t>{2, 3, 4, 5, 6}));
  EXPECT_EQ(maps.q.chunk_of_row, (std::vector<std::int32_t>{0, 0, 1, -1, 2, 2, -1}));
  EXPECT_EQ(maps.kv.chunk_of_row, (std::vector<std::int32_t>{-1, -1, 0, 0, 1, 1, 2, -1, -1}));
  EXPECT_EQ(maps.visible_keys, (std::vector<std::int64_t>{3, 4, 5, 0, 0, 0, 0}));
  EXPECT_EQ(maps.visible_pairs(), 12.0);
}

/// One lane of 120 tokens in chunks of 32, and its single-rank result.
class ReferenceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_.seq_len = 120;
    config_.heads = 4;
    config_.kv_heads = 2;
    config_.head_dim = 8;
    config_.dlse = true;
    config_.cp_config.chunk_tokens = 32;
    config_.cp_config.threads = 1;
    inputs_ = open_inputs(config_);
    lane_ = lanes_of(config_)[0];
    maps_ = make_row_maps(inputs_[0]->info().batch, cp_config_of(config_, lane_));
    LoopbackWorld(1).run([&](Communicator& comm) {
      World world{comm, 1};
      single_rank_ =
          run_lane({config_, *inputs_[0], lane_, std::nullopt}, world, ShardPlace::on_cpu(config_));
    });
  }

  Reference make(std::int64_t rows, bool has_single_rank = true) {
    config_.reference_rows = rows;
    return make_reference({.config = config_,
                           .source = *inputs_[0],
                           .lane = lane_,
                           .maps = maps_,
                           .single_rank = has_single_rank ? &*single_rank_ : nullptr});
  }

  RunConfig config_;
  Inputs inputs_;
  LaneConfig lane_{};
  RowMaps maps_;
  std::optional<LaneResult> single_rank_;
};

TEST_F(ReferenceTest, HoldsEveryRowOfEveryTensor) {
  const Reference exact = make(0);

  EXPECT_EQ(exact.q.rows.size(), 120u);
  EXPECT_EQ(exact.kv.rows.size(), 120u);
  EXPECT_EQ(exact.out.size(), 120u * 4 * 8);
  EXPECT_EQ(exact.gradient.dq.values.size(), 120u * 4 * 8);
  EXPECT_EQ(exact.gradient.dk.values.size(), 120u * 2 * 8);
  EXPECT_EQ(exact.gradient.dv.sensitivities.size(), 120u * 2);
  EXPECT_EQ(exact.groups.size(), 4u * 4);
}

// dk and dv of few keys take lse and out of the rows that are not computed from the single-rank
// run, in f32: relative 2^-24 |lse| and 2^-24 |out|, a few of which is far less than 1e-5.
TEST_F(ReferenceTest, FewRowsAreThoseOfTheWhole) {
  const Reference whole = make(0);
  const Reference some = make(10);

  ASSERT_EQ(some.q.rows.size(), 10u);
  ASSERT_EQ(some.kv.rows.size(), 10u);
  for (std::size_t i = 0; i < 10; ++i) {
    const auto q = static_cast<std::size_t>(some.q.rows[i]) * 32;
    const auto kv = static_cast<std::size_t>(some.kv.rows[i]) * 16;
    for (std::size_t d = 0; d < 32; ++d)
      EXPECT_EQ(some.gradient.dq.values[i * 32 + d], whole.gradient.dq.values[q + d]);
    for (std::size_t d = 0; d < 16; ++d) {
      EXPECT_NEAR(some.gradient.dk.values[i * 16 + d], whole.gradient.dk.values[kv + d], 1e-5);
      EXPECT_NEAR(some.gradient.dv.values[i * 16 + d], whole.gradient.dv.values[kv + d], 1e-5);
    }
  }
}

TEST_F(ReferenceTest, WithoutASingleRankRunFewKeysAreNone) {
  const Reference exact = make(10, false);

  EXPECT_EQ(exact.q.rows.size(), 10u);
  EXPECT_TRUE(exact.kv.rows.empty());
  EXPECT_EQ(exact.gradient.dq.values.size(), 10u * 4 * 8);
}

TEST_F(ReferenceTest, ForwardAloneHasNoGradients) {
  config_.direction = Direction::forward;
  const Reference exact = make(0);

  EXPECT_EQ(exact.out.size(), 120u * 4 * 8);
  EXPECT_TRUE(exact.kv.rows.empty());
  EXPECT_TRUE(exact.gradient.dq.values.empty());
}

}  // namespace
}  // namespace cpattn
