// The claim of the product on loopback ranks: the same bits for every CP size and every way to run.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/attend.h"
#include "tests/support/batches.h"
#include "tests/support/compare.h"
#include "tests/support/error_bound.h"

namespace cpattn::testing {
namespace {

constexpr std::array kDTypes{DType::f32, DType::f16, DType::bf16};
constexpr std::array kMasks{MaskKind::full, MaskKind::causal};
constexpr std::array kShardings{ShardingKind::contiguous, ShardingKind::zigzag};
constexpr std::array kWorldSizes{2, 3, 4, 7, 8};

::testing::AssertionResult same(const Attended& actual, const Attended& expected) {
  auto result = bits_equal(actual.out, expected.out);
  if (!result) return result << " (out)";
  result = bits_equal(actual.lse, expected.lse);
  if (!result) return result << " (lse)";
  return result;
}

std::string describe(const AttentionCase& problem, int world_size) {
  const CpConfig& c = problem.config;
  return cpattn::detail::concat(name_of(c.sharding), " ", name_of(c.mask), " ",
                                name_of(problem.dtype), ", chunks of ", c.chunk_tokens,
                                ", shuffle ", c.shuffle_arrival, ", P = ", world_size);
}

/// CP sizes and shardings against P = 1; some also in a shuffled order (which waits, on purpose).
void expect_one_answer(AttentionCase problem, std::initializer_list<int> world_sizes,
                       const KernelTable& kernels = default_kernels()) {
  const Attended expected = attend(problem, 1, {.kernels = &kernels});
  EXPECT_TRUE(
      near_reference(problem, expected, error_model(kernels, problem.dtype, problem.out_dtype)))
      << describe(problem, 1);
  for (const int world_size : world_sizes)
    for (const ShardingKind sharding : kShardings)
      for (const std::int64_t shuffle : {0, 3}) {
        if (shuffle != 0 && (problem.dtype != DType::f32 || world_size % 2 == 0)) continue;
        problem.config.sharding = sharding;
        problem.config.shuffle_arrival = shuffle;
        EXPECT_TRUE(same(attend(problem, world_size, {.kernels = &kernels}), expected))
            << describe(problem, world_size);
      }
}

TEST(RingForward, SmallPacksHaveOneAnswer) {
  const AttentionShape shape = make_shape(4, 2, 12, 9);
  for (const NamedBatch& named : small_batches()) {
    SCOPED_TRACE(named.name);
    for (const MaskKind mask : kMasks)
      for (const std::int64_t chunk_tokens : {5, 16}) {
        const CpConfig config = test_config(mask, chunk_tokens);
        expect_one_answer(make_random_case(shape, named.batch, config, DType::f32, 1),
                          {2, 3, 4, 7, 8});
        // The ring carries bytes: the types differ in the kernels, not in who works on what.
        for (const DType dtype : {DType::f16, DType::bf16})
          expect_one_answer(make_random_case(shape, named.batch, config, dtype, 1), {3, 8});
      }
  }
}

TEST(RingForward, SingleTokenChunks) {
  for (const MaskKind mask : kMasks)
    expect_one_answer(make_random_case(make_shape(2, 1, 8, 8), batch_of_one(41, 41),
                                       test_config(mask, 1), DType::f32, 2),
                      {2, 3, 4, 7, 8});
}

TEST(RingForward, ChunksLongerThanEverything) {
  expect_one_answer(make_random_case(make_shape(2, 1, 8, 8), pack({30, 2, 57}),
                                     test_config(MaskKind::causal, 512), DType::f32, 2),
                    {2, 4, 8});
}

TEST(RingForward, ChunksOfSeveralTiles) {
  // 300 keys are three key tiles and 300 rows seven row tiles of any table so far.
  for (const DType dtype : kDTypes)
    expect_one_answer(make_random_case(make_shape(3, 1, 40, 24), pack({1000, 37}),
                                       test_config(MaskKind::causal, 300), dtype, 4),
                      {2, 3});
}

TEST(RingForward, EveryKernelTable) {
  for (const KernelTable* table : available_kernels()) {
    SCOPED_TRACE(table->name);
    for (const DType dtype : kDTypes)
      expect_one_answer(make_random_case(make_shape(4, 2, 33, 17), pack({150, 0, 49}),
                                         test_config(MaskKind::causal, 32), dtype, 5),
                        {2, 3, 4}, *table);
  }
}

TEST(RingForward, ShuffledArrivalAndDelivery) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 16, 16), pack({90, 0, 33}),
                                           test_config(MaskKind::causal, 8), DType::f32, 6);
  const Attended expected = attend(problem);
  for (const int world_size : kWorldSizes)
    for (std::int64_t seed = 1; seed <= 4; ++seed) {
      problem.config.shuffle_arrival = seed;
      const Attended result =
          attend(problem, world_size, {.shuffle_delivery = static_cast<std::uint64_t>(seed)});
      EXPECT_TRUE(same(result, expected)) << describe(problem, world_size);
    }
}

TEST(RingForward, ThreadsChecksumsShortMessagesAndRepeats) {
  AttentionCase problem = make_random_case(make_shape(4, 2, 16, 16), pack({90, 0, 33}),
                                           test_config(MaskKind::causal, 16), DType::bf16, 6);
  const Attended expected = attend(problem);
  problem.config.threads = 3;
  problem.config.verify_checksum = true;
  problem.config.max_message_bytes = 1000;
  for (const int world_size : {1, 2, 4})
    EXPECT_TRUE(same(attend(problem, world_size, {.repeats = 3}), expected))
        << describe(problem, world_size);
}

TEST(RingForward, DualChunkShards) {
  // Parts of 24, 16 and 12 tokens, and half of that: chunks of 2 meet their borders, of 7 do not.
  for (const MaskKind mask : kMasks)
    for (const std::int64_t chunk_tokens : {2, 7}) {
      AttentionCase problem = make_random_case(make_shape(4, 2, 12, 9), pack({96, 0, 48}),
                                               test_config(mask, chunk_tokens), DType::f32, 6);
      problem.config.sharding = ShardingKind::dual_chunk;
      const Attended single = attend(problem);
      for (const int world_size : {2, 3, 4}) {
        const Plan plan(problem_of(problem), problem.config, default_kernels(), 0, world_size);
        const bool is_bitwise = plan.guarantee() == kBitwise;
        EXPECT_EQ(is_bitwise, chunk_tokens == 2);
        const Attended result = attend(problem, world_size);
        EXPECT_TRUE(near_reference(problem, result,
                                   error_model(default_kernels(), DType::f32, DType::f32)));
        problem.config.shuffle_arrival = 3;
        EXPECT_TRUE(same(attend(problem, world_size), is_bitwise ? single : result))
            << describe(problem, world_size);
        problem.config.shuffle_arrival = 0;
      }
    }
}

TEST(RingForward, AllOutputTypes) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 16, 16), batch_of_one(70, 70),
                                           test_config(MaskKind::causal, 16), DType::f32, 6);
  for (const DType out_dtype : kDTypes) {
    problem.out_dtype = out_dtype;
    expect_one_answer(problem, {2, 4});
  }
}

TEST(RingForward, ADocumentAloneEqualsTheDocumentInAPack) {
  const SequenceBatch whole = pack({31, 64, 7});
  const CpConfig config = test_config(MaskKind::causal, 8);
  const AttentionCase packed =
      make_random_case(make_shape(2, 1, 16, 16), whole, config, DType::f32, 8);
  const Attended expected = attend(packed, 3);
  AttentionCase alone = make_case(packed.shape, batch_of_one(64, 64), config);
  for (std::int64_t i = 0; i < 64; ++i) {
    alone.q.copy_row(i, packed.q, 31 + i);
    alone.k.copy_row(i, packed.k, 31 + i);
    alone.v.copy_row(i, packed.v, 31 + i);
  }
  const Attended result = attend(alone, 4);
  std::vector<std::int64_t> rows(64);
  for (std::size_t i = 0; i < 64; ++i) rows[i] = 31 + static_cast<std::int64_t>(i);
  EXPECT_TRUE(bits_equal(result.out, expected.out.rows(rows)));
  EXPECT_TRUE(bits_equal(result.lse, {expected.lse.begin() + 62, expected.lse.begin() + 190}));
}

TEST(RingForward, APrefillInPiecesEqualsThePrefillAtOnce) {
  // The tail of 20 queries over all 70 keys: the rows 50..69 of the whole, bit for bit.
  const CpConfig config = test_config(MaskKind::causal, 16);
  const AttentionCase whole =
      make_random_case(make_shape(2, 1, 16, 16), batch_of_one(70, 70), config, DType::f32, 9);
  const Attended expected = attend(whole, 2);
  std::vector<std::int64_t> rows(20);
  for (std::size_t i = 0; i < 20; ++i) rows[i] = 50 + static_cast<std::int64_t>(i);
  AttentionCase tail = whole;
  tail.batch = batch_of_one(20, 70);
  tail.q = whole.q.rows(rows);
  for (const int world_size : {1, 3})
    EXPECT_TRUE(bits_equal(attend(tail, world_size).out, expected.out.rows(rows)));
}

TEST(RingForward, ArrivalStaysWithinTheBound) {
  for (const NamedBatch& named : small_batches())
    for (const DType dtype : kDTypes)
      for (const int world_size : {1, 2, 3, 8}) {
        AttentionCase problem = make_random_case(make_shape(4, 2, 12, 9), named.batch,
                                                 test_config(MaskKind::causal, 5), dtype, 1);
        problem.config.schedule = ScheduleKind::arrival;
        problem.config.shuffle_arrival = world_size;
        EXPECT_TRUE(near_reference(problem, attend(problem, world_size),
                                   error_model(default_kernels(), dtype, dtype)))
            << named.name << ": " << describe(problem, world_size);
      }
}

TEST(RingForward, ANanStaysInItsRow) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 16, 16), batch_of_one(70, 70),
                                           test_config(MaskKind::causal, 8), DType::f32, 9);
  const Attended clean = attend(problem);
  problem.q.set(33, 1, 5, kNan);
  const Attended result = attend(problem, 4);
  for (std::int64_t row = 0; row < 70; ++row) {
    if (row == 33) continue;
    EXPECT_TRUE(bits_equal(result.out.rows(std::array{row}), clean.out.rows(std::array{row})))
        << row;
  }
  EXPECT_TRUE(std::isnan(result.out.at(33, 1, 0)));
  EXPECT_TRUE(std::isnan(result.lse[67]));
}

}  // namespace
}  // namespace cpattn::testing
