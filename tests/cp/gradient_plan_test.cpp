#include "cp/gradient_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

Problem small_problem() {
  return {.shape = {4, 2, 16, 24, 0.25},
          .batch = pack({31, 0, 7, 64, 1}),
          .dtype = DType::bf16,
          .out_dtype = DType::f32};
}
CpConfig small_config(ScheduleKind schedule = ScheduleKind::canonical) {
  CpConfig config;
  config.chunk_tokens = 8;
  config.threads = 1;
  config.schedule = schedule;
  return config;
}

/// Plan and GradientPlan of every rank.
struct Plans {
  std::vector<Plan> plans;
  std::vector<GradientPlan> gradients;

  Plans(const Problem& problem, const CpConfig& config, int world_size) {
    for (int rank = 0; rank < world_size; ++rank)
      plans.emplace_back(problem, config, default_kernels(), rank, world_size);
    for (const Plan& plan : plans) gradients.emplace_back(plan);
  }
};

TEST(GradientPlan, BothEndsCutAMessageAtTheSamePlaces) {
  for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
    for (const int world_size : {2, 3, 4, 7}) {
      const Plans all(small_problem(), small_config(schedule), world_size);
      for (const GradientPlan& mine : all.gradients)
        for (std::size_t t = 1; t < mine.schedule().steps.size(); ++t) {
          const GradientStep& step = mine.schedule().steps[t];
          const GradientPlan& sender = all.gradients[static_cast<std::size_t>(step.pieces_from)];
          EXPECT_EQ(mine.bytes_in(t), sender.bytes_out(t));
          EXPECT_LE(mine.bytes_in(t), mine.max_bytes_in());
          EXPECT_LE(mine.bytes_out(t), mine.max_bytes_out());
          // The owner walks the chunks; the sender has placed piece k of each at the same offset.
          std::size_t next = 0;
          for (std::size_t j = 0; j < step.arriving.size(); ++j) {
            const KvPlaces& places = sender.schedule().steps[t].kv[j];
            ASSERT_EQ(places.num_pieces, step.arriving[j]);
            for (int k = 0; k < places.num_pieces; ++k) {
              const DkvPlace& there =
                  sender.places(t)[static_cast<std::size_t>(places.first_place + k)];
              EXPECT_EQ(there.area, DkvArea::message);
              EXPECT_EQ(there.offset, next);
              next += mine.dkv_bytes(j);
            }
          }
          EXPECT_EQ(next, mine.bytes_in(t));
        }
    }
}

TEST(GradientPlan, PlacesOfAStepAreApartAndInsideTheirMemory) {
  for (const int world_size : {1, 2, 3, 4}) {
    const Plans all(small_problem(), small_config(), world_size);
    for (std::size_t rank = 0; rank < all.gradients.size(); ++rank) {
      const GradientPlan& mine = all.gradients[rank];
      for (std::size_t t = 0; t < mine.schedule().steps.size(); ++t) {
        const GradientStep& step = mine.schedule().steps[t];
        std::map<DkvArea, std::vector<std::pair<std::size_t, std::size_t>>> taken;
        ASSERT_EQ(mine.places(t).size(), static_cast<std::size_t>(step.num_places));
        const auto& kv =
            all.plans[rank].sharding().shards[static_cast<std::size_t>(step.kv_owner)].kv;
        for (std::size_t j = 0; j < kv.size(); ++j)
          for (std::int32_t k = 0; k < step.kv[j].num_places; ++k) {
            const DkvPlace& place =
                mine.places(t)[static_cast<std::size_t>(step.kv[j].first_place + k)];
            const std::size_t bytes = default_kernels().gradient.dkv_slot_bytes(
                all.plans[rank].kernel_problem(), kv[j].num_tokens);
            EXPECT_EQ(place.offset % 64, 0u);
            taken[place.area].push_back({place.offset, place.offset + bytes});
          }
        for (auto& [area, ranges] : taken) {
          std::sort(ranges.begin(), ranges.end());
          for (std::size_t i = 1; i < ranges.size(); ++i)
            EXPECT_LE(ranges[i - 1].second, ranges[i].first);
          const std::size_t size = area == DkvArea::work      ? mine.memory().work_dkv
                                   : area == DkvArea::carried ? mine.memory().carried_dkv
                                                              : mine.bytes_out(t);
          EXPECT_LE(ranges.back().second, size);
        }
      }
    }
  }
}

TEST(GradientPlan, CarriedSlotsOfChunksAreApart) {
  const Plans all(small_problem(), small_config(), 3);
  for (const GradientPlan& mine : all.gradients) {
    std::size_t next = 0;
    for (std::size_t j = 0; j < mine.schedule().carried_dkv.size(); ++j) {
      EXPECT_EQ(mine.carried_offset(j), next);
      next += static_cast<std::size_t>(mine.schedule().carried_dkv[j]) * mine.dkv_bytes(j);
    }
    EXPECT_EQ(next, mine.memory().carried_dkv);
  }
}

TEST(GradientPlan, BytesOnTheWireAreSpansAndPieces) {
  for (const int world_size : {1, 2, 3, 8}) {
    const Plans all(small_problem(), small_config(), world_size);
    for (std::size_t rank = 0; rank < all.gradients.size(); ++rank) {
      const GradientPlan& mine = all.gradients[rank];
      std::size_t bytes = mine.ring().bytes_sent();
      for (std::size_t t = 0; t < mine.schedule().steps.size(); ++t) bytes += mine.bytes_out(t);
      EXPECT_EQ(mine.bytes_on_wire(), bytes);
      EXPECT_EQ(mine.bytes_out(0), 0u);
      EXPECT_EQ(mine.bytes_on_wire() == 0, world_size == 1);
    }
  }
}

TEST(GradientPlan, ArrivalSendsOnePiecePerChunkAndStep) {
  const Plans canonical(small_problem(), small_config(), 3);
  const Plans arrival(small_problem(), small_config(ScheduleKind::arrival), 3);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_LE(arrival.gradients[rank].bytes_on_wire(), canonical.gradients[rank].bytes_on_wire());
    EXPECT_LE(arrival.gradients[rank].memory_bytes(), canonical.gradients[rank].memory_bytes());
    for (const GradientStep& step : arrival.gradients[rank].schedule().steps)
      for (const KvPlaces& places : step.kv) EXPECT_LE(places.num_places, 1);
  }
}

TEST(GradientPlan, MemoryIsLinearInTheShard) {
  for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
    for (const int world_size : {1, 2, 4}) {
      CpConfig config = small_config(schedule);
      config.chunk_tokens = 64;
      const auto most = [&](std::int64_t tokens) {
        const Problem problem{.shape = {4, 2, 64, 64, 0.125},
                              .batch = batch_of_one(tokens, tokens)};
        std::size_t bytes = 0;
        for (const GradientPlan& plan : Plans(problem, config, world_size).gradients)
          bytes = std::max(bytes, plan.memory_bytes());
        return static_cast<double>(bytes);
      };
      // Twice the tokens take twice the memory, and the sums that wait grow by one level of seven.
      EXPECT_LE(most(16384) / most(8192), 2.0 * 8 / 7) << world_size;
    }
}

TEST(GradientPlan, MemoryIsTheSumOfItsParts) {
  for (const GradientPlan& plan : Plans(small_problem(), small_config(), 3).gradients) {
    const GradientMemory& m = plan.memory();
    EXPECT_EQ(plan.memory_bytes(), m.ring_slots + m.queries + m.carried_dq + m.carried_dkv +
                                       m.work_dkv + m.messages + m.workspace);
    EXPECT_GT(m.queries, 0u);
    EXPECT_GT(m.messages, 0u);
    EXPECT_GT(m.workspace, 0u);
  }
}

TEST(GradientPlan, RanksAgreeAlsoOnTheBackward) {
  const Plans all(small_problem(), small_config(), 3);
  const std::string expected = all.gradients[0].agreement_lines();
  for (const GradientPlan& plan : all.gradients) EXPECT_EQ(plan.agreement_lines(), expected);
  for (const std::string key : {"gradient_spans=", "gradient_pieces=", "world_size="})
    EXPECT_NE(expected.find(key), std::string::npos) << expected;

  // A table that lays its memory out in another way is told apart, even by that name.
  KernelTable other = default_kernels();
  other.gradient.dkv_slot_bytes = [](const KernelProblem&, std::int64_t) {
    return std::size_t{64};
  };
  const Plan plan(small_problem(), small_config(), other, 0, 3);
  EXPECT_EQ(plan.agreement_lines(), all.plans[0].agreement_lines());
  EXPECT_NE(GradientPlan(plan).agreement_lines(), expected);
}

TEST(GradientPlan, KernelsWithoutABackwardAreRefused) {
  KernelTable forward_only = default_kernels();
  forward_only.gradient = {};
  const Plan plan(small_problem(), small_config(), forward_only, 0, 2);
  EXPECT_THROW(GradientPlan{plan}, Unsupported);
}

}  // namespace
}  // namespace cpattn::testing
