// K24 largest logits and clipping: what head_maxima reports under masks, padding, scales and ranks.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "src/comm/max_over_ranks.h"
#include "tests/cases/closed_form.h"
#include "tests/support/attend.h"

namespace cpattn::testing {
namespace {

/// head_maxima of every rank after `repeats` calls, and what max_over_ranks makes of them.
struct Maxima {
  std::vector<std::vector<float>> of_rank;
  std::vector<std::vector<float>> of_all;
};

Maxima maxima_of(const AttentionCase& problem, int world_size, int repeats = 1) {
  const auto ranks = static_cast<std::size_t>(world_size);
  Maxima result{std::vector<std::vector<float>>(ranks), std::vector<std::vector<float>>(ranks)};
  LoopbackWorld(world_size).run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                    world_size);
    RankTensors tensors(problem, plan.shard());
    std::vector<float> maxima(static_cast<std::size_t>(problem.shape.num_heads), -kInf);
    ForwardTensors views = tensors.views();
    views.head_maxima = contiguous_view(maxima.data(), std::array{problem.shape.num_heads});
    RingAttention attention(plan, comm);
    for (int i = 0; i < repeats; ++i) attention.forward(views);
    result.of_rank[rank] = maxima;
    max_over_ranks(comm, maxima, deadline_after(Seconds(30)));
    result.of_all[rank] = maxima;
  });
  return result;
}

/// One product, one scale, one change of base: four roundings at most.
void expect_logit(float found, double logit) {
  const double bound = 4 * 0x1p-24 * std::abs(logit);
  EXPECT_NEAR(found, logit, bound);
}

/// All logits 0, but q_i.k_j = dot for the pairs that are set.
AttentionCase zero_logits(const SequenceBatch& batch, const AttentionShape& shape, MaskKind mask) {
  AttentionCase problem = make_case(shape, batch, test_config(mask, 4));
  for (HostTensor* tensor : {&problem.q, &problem.k, &problem.v})
    for (std::int64_t i = 0; i < tensor->shape()[0]; ++i)
      for (std::int64_t h = 0; h < tensor->shape()[1]; ++h)
        for (std::int64_t d = 0; d < tensor->shape()[2]; ++d) tensor->set(i, h, d, 0.0f);
  return problem;
}

// Two documents, a local maximum in each: every rank learns the same one, and a rank without keys
// contributes nothing.
TEST(BC_109, TheLargestLogitOfAllRanks) {
  AttentionShape shape = make_shape(2, 2, 8, 8);
  shape.softmax_scale = 1.0;
  AttentionCase problem = zero_logits(batch_of_one(8, 8), shape, MaskKind::causal);
  problem.q.set(1, 0, 0, 120.0f);
  problem.k.set(0, 0, 0, 1.0f);
  problem.q.set(7, 0, 1, 400.0f);
  problem.k.set(6, 0, 1, 1.0f);
  for (const int world_size : {1, 2, 4}) {
    const Maxima maxima = maxima_of(problem, world_size);
    for (const std::vector<float>& of_all : maxima.of_all) {
      expect_logit(of_all[0], 400.0);
      EXPECT_EQ(of_all[1], 0.0f);
      const double gamma = 100.0 / of_all[0];
      EXPECT_NEAR(std::sqrt(gamma), 0.5, 4 * 0x1p-24);  // of the weights of q and k each
      EXPECT_EQ(of_all, maxima.of_all[0]) << "ranks that clip differently drift apart";
    }
    const bool some_rank_saw_less =
        std::any_of(maxima.of_rank.begin(), maxima.of_rank.end(),
                    [](const std::vector<float>& mine) { return mine[0] < 399.0f; });
    EXPECT_EQ(some_rank_saw_less, world_size > 1);
    if (world_size == 4) {  // two chunks of four tokens: half of the ranks own none
      EXPECT_EQ(std::count(maxima.of_rank.begin(), maxima.of_rank.end(),
                           std::vector<float>{-kInf, -kInf}),
                2);
    }
  }
}

// The statistic knows the mask, the padding and the scale that the attention knows. (There is no
// window or sink that could hide a logit.)
TEST(BC_110, OnlyVisibleLogitsCountAndTheyAreScaled) {
  AttentionShape shape = make_shape(1, 1, 8, 8);
  shape.softmax_scale = 0.25;
  SequenceBatch batch = batch_from_padded({0, 8}, {7}, 8);
  AttentionCase problem = zero_logits(batch, shape, MaskKind::causal);
  problem.q.set(5, 0, 0, 40.0f);
  problem.k.set(2, 0, 0, 1.0f);
  problem.q.set(3, 0, 1, 500.0f);
  problem.k.set(6, 0, 1, 1.0f);  // the future of row 3
  problem.q.set(4, 0, 2, 600.0f);
  problem.k.set(7, 0, 2, 1.0f);  // padding
  for (const int world_size : {1, 2}) {
    for (const std::vector<float>& of_all : maxima_of(problem, world_size).of_all) {
      ASSERT_EQ(of_all.size(), 1u) << "one for each query head";
      expect_logit(of_all[0], 10.0);
    }
  }
}

TEST(HeadMaxima, BitsDoNotDependOnTheSplitAndCallsAccumulate) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = make_random_case(make_shape(4, 2, 24, 16), pack({70, 1, 0, 33}),
                                             test_config(MaskKind::causal, 16), dtype, 7);
    const std::vector<float> alone = maxima_of(problem, 1).of_all[0];
    for (const float maximum : alone) EXPECT_TRUE(std::isfinite(maximum));
    for (const int world_size : {2, 3, 4}) {
      for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival}) {
        problem.config.schedule = schedule;
        EXPECT_EQ(maxima_of(problem, world_size, 2).of_all[0], alone);
      }
    }
  }
}

TEST(HeadMaxima, ANaNOfAnyRankIsSeenByAll) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), pack({40}),
                                           test_config(MaskKind::causal, 8), DType::f32, 7);
  problem.q.set(33, 1, 2, std::numeric_limits<float>::quiet_NaN());
  for (const std::vector<float>& of_all : maxima_of(problem, 3).of_all) {
    EXPECT_FALSE(std::isnan(of_all[0]));
    EXPECT_TRUE(std::isnan(of_all[1]));
  }
}

TEST(MaxOverRanks, DifferingCountsAreRefusedOnEveryRank) {
  const auto texts = refusals(3, [](Communicator& comm) {
    std::vector<float> values(comm.rank() == 1 ? 2 : 3, 0.0f);
    max_over_ranks(comm, values, deadline_after(Seconds(30)));
  });
  for (const std::string& text : texts)
    EXPECT_EQ(text, "max_over_ranks: rank 1 has 2 values, expected 3 as rank 0 has");
}

}  // namespace
}  // namespace cpattn::testing
