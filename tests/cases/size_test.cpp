// K15 matched exchanges, K17 counts, K19 memory.
#include <algorithm>
#include <vector>

#include "tests/cases/closed_form.h"

namespace cpattn::testing {
namespace {

// The result part: ranks without tokens and hops without work change nothing.
TEST(BC_071, RanksWithoutTokensAndHopsWithoutWork) {
  for (const DType dtype : kAllDTypes) {
    expect_everywhere(u_recipe(batch_of_one(16, 16), MaskKind::causal, dtype),
                      [](std::int64_t i, auto) { return first_keys(i + 1); },
                      {.world_sizes = {4}, .chunk_sizes = {4, 16}});
    expect_everywhere(u_recipe(pack({1, 2}), MaskKind::causal, dtype),
                      [](std::int64_t i, auto) { return first_keys(i == 0 ? 1 : i); },
                      {.world_sizes = {4, 7}, .chunk_sizes = {8}});
  }
}

TEST(BC_081, SeventyThousandDocumentsOfOneToken) {
  constexpr std::int64_t kDocuments = 70'000;
  const SequenceBatch batch = pack(std::vector<std::int64_t>(kDocuments, 1));
  AttentionCase problem = make_random_case({1, 1, 8, 8, 1.0}, batch,
                                           test_config(MaskKind::causal, 512), DType::f32, 81);
  problem.k.fill([](auto...) { return 0.0f; });
  for (const int world_size : {1, 2}) {
    const Attended result = attend(problem, world_size);
    EXPECT_TRUE(bits_equal(result.out, problem.v)) << "CP" << world_size;
    EXPECT_TRUE(bits_equal(result.lse, std::vector<float>(kDocuments, 0.0f)));
  }
}

// Out must be V whatever the logit: the weight of an only key is divided out again.
TEST(BC_081, TheOnlyKeyIsTheAnswerWhateverItsLogit) {
  constexpr std::int64_t kDocuments = 2'000;
  const SequenceBatch batch = pack(std::vector<std::int64_t>(kDocuments, 1));
  for (const DType dtype : kAllDTypes) {
    const AttentionCase problem =
        make_random_case({1, 1, 8, 8, 1.0}, batch, test_config(MaskKind::causal, 512), dtype, 81);
    const reference::AttentionResult expected = reference_of(problem);
    for (const int world_size : {1, 2}) {
      const Attended result = attend(problem, world_size);
      EXPECT_TRUE(bits_equal(result.out, problem.v)) << name_of(dtype);
      for (std::size_t i = 0; i < kDocuments; ++i)
        EXPECT_NEAR(result.lse[i], expected.lse[i], 1e-5) << i;
    }
  }
}

/// 4095 documents of one token and one of 4096, `copies` times.
SequenceBatch skewed_pack(int copies) {
  std::vector<std::int64_t> lengths;
  for (int i = 0; i < copies; ++i) {
    lengths.insert(lengths.end(), 4095, 1);
    lengths.push_back(4096);
  }
  return pack(lengths);
}

TEST(BC_087, MemoryIsLinearInASkewedPack) {
  const auto memory = [](int copies, int rank, int world_size, ScheduleKind schedule) {
    CpConfig config;
    config.schedule = schedule;
    const Problem problem{.shape = make_shape(8, 8, 64, 64), .batch = skewed_pack(copies)};
    return Plan(problem, config, default_kernels(), rank, world_size).memory();
  };
  for (const ScheduleKind schedule : {ScheduleKind::canonical, ScheduleKind::arrival})
    for (const int world_size : {1, 2, 4}) {
      std::size_t once = 0, twice = 0, outputs = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        once = std::max(once, memory(1, rank, world_size, schedule).total());
        twice = std::max(twice, memory(2, rank, world_size, schedule).total());
        outputs += memory(1, rank, world_size, schedule).outputs;
      }
      EXPECT_LE(static_cast<double>(twice), 2.2 * static_cast<double>(once)) << "CP" << world_size;
      // out, and lse of 8 * 8191 floats: nothing is as long as documents x longest document.
      EXPECT_EQ(outputs, 8u * 8191 * 64 * 4 + 8u * 8191 * 4);
      // Inputs, outputs, two ring slots (one token takes a panel of 8) and what is carried.
      EXPECT_LE(once, 40 * outputs) << "CP" << world_size;
    }
}

}  // namespace
}  // namespace cpattn::testing
