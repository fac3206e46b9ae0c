// The claim of the product for gradients, on loopback ranks: the same bits for every CP size and
// every way to run.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/attend_backward.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

constexpr std::array kDTypes{DType::f32, DType::f16, DType::bf16};
constexpr std::array kMasks{MaskKind::full, MaskKind::causal};

std::string describe(const AttentionCase& problem, int world_size) {
  const CpConfig& c = problem.config;
  return cpattn::detail::concat(name_of(c.sharding), " ", name_of(c.mask), " ",
                                name_of(problem.dtype), ", chunks of ", c.chunk_tokens,
                                ", shuffle ", c.shuffle_arrival, ", P = ", world_size);
}

/// Every document on its own against the bound of a correct f32 backward.
void expect_accurate(const AttentionCase& problem, const Upstream& upstream,
                     const Gradients& actual, const KernelTable& kernels) {
  const auto range = [](std::int64_t begin, std::int64_t count) {
    std::vector<std::int64_t> rows;
    for (std::int64_t i = 0; i < count; ++i) rows.push_back(begin + i);
    return rows;
  };
  for (const Document& d : problem.batch.documents) {
    const auto q_rows = range(d.q_begin, d.q_tokens), kv_rows = range(d.kv_begin, d.kv_tokens);
    GradientInputs in{.shape = problem.shape,
                      .mask = {problem.config.mask, 1 + d.kv_tokens - d.q_tokens},
                      .out_dtype = problem.out_dtype,
                      .q = problem.q.rows(q_rows),
                      .k = problem.k.rows(kv_rows),
                      .v = problem.v.rows(kv_rows),
                      .dout = upstream.dout.rows(q_rows),
                      .dlse = {}};
    if (!upstream.dlse.empty()) {
      const auto begin = upstream.dlse.begin() + d.q_begin * problem.shape.num_heads;
      in.dlse.assign(begin, begin + d.q_tokens * problem.shape.num_heads);
    }
    const BoundedGradients expected = bounded_gradients(in, kernels.numerics(problem.dtype));
    EXPECT_TRUE(expected.dq.accepts(actual.dq.rows(q_rows))) << "dq";
    EXPECT_TRUE(expected.dk.accepts(actual.dk.rows(kv_rows))) << "dk";
    EXPECT_TRUE(expected.dv.accepts(actual.dv.rows(kv_rows))) << "dv";
  }
}

struct Ways {
  std::vector<int> world_sizes{2, 3, 4, 7};
  std::vector<ShardingKind> shardings{ShardingKind::contiguous, ShardingKind::zigzag};
  DType gradient_dtype = DType::f32;
  const KernelTable* kernels = &default_kernels();
};

/// All ways against P = 1; some also in a shuffled order (which waits, on purpose).
void expect_one_answer(AttentionCase problem, const Ways& ways, std::uint64_t seed = 1,
                       bool has_dlse = true) {
  const Upstream upstream = random_upstream(problem, seed, has_dlse);
  DifferentiateOptions options{.kernels = ways.kernels, .dtype = ways.gradient_dtype};
  const Gradients expected = differentiate(problem, upstream, 1, options);
  if (ways.gradient_dtype == DType::f32)
    expect_accurate(problem, upstream, expected, *ways.kernels);
  for (const int world_size : ways.world_sizes)
    for (const ShardingKind sharding : ways.shardings)
      for (const std::int64_t shuffle : {0, 3}) {
        if (shuffle != 0 && (problem.dtype != DType::f32 || world_size % 2 == 0)) continue;
        problem.config.sharding = sharding;
        problem.config.shuffle_arrival = shuffle;
        EXPECT_TRUE(same(differentiate(problem, upstream, world_size, options), expected))
            << describe(problem, world_size);
      }
}

TEST(RingBackward, SmallPacksHaveOneAnswer) {
  const AttentionShape shape = make_shape(4, 2, 12, 9);
  for (const NamedBatch& named : small_batches()) {
    SCOPED_TRACE(named.name);
    for (const MaskKind mask : kMasks)
      for (const std::int64_t chunk_tokens : {5, 16}) {
        const CpConfig config = test_config(mask, chunk_tokens);
        expect_one_answer(make_random_case(shape, named.batch, config, DType::f32, 1), {});
        for (const DType dtype : {DType::f16, DType::bf16})
          expect_one_answer(make_random_case(shape, named.batch, config, dtype, 1),
                            {.world_sizes = {3, 4}});
      }
  }
}

TEST(RingBackward, SingleTokenChunks) {
  for (const MaskKind mask : kMasks)
    expect_one_answer(make_random_case(make_shape(2, 1, 8, 8), batch_of_one(41, 41),
                                       test_config(mask, 1), DType::f32, 2),
                      {.world_sizes = {2, 3, 4, 7, 8}});
}

TEST(RingBackward, ChunksOfSeveralTiles) {
  for (const DType dtype : kDTypes)
    expect_one_answer(make_random_case(make_shape(3, 1, 40, 24), pack({700, 37}),
                                       test_config(MaskKind::causal, 150), dtype, 4),
                      {.world_sizes = {2, 3}}, 4, false);
}

TEST(RingBackward, EveryKernelTable) {
  for (const KernelTable* table : available_kernels()) {
    if (table->gradient.backward == nullptr) continue;
    SCOPED_TRACE(table->name);
    for (const DType dtype : kDTypes)
      expect_one_answer(make_random_case(make_shape(4, 2, 33, 17), pack({150, 0, 49}),
                                         test_config(MaskKind::causal, 32), dtype, 5),
                        {.world_sizes = {2, 3}, .kernels = table});
  }
}

TEST(RingBackward, GradientsOfAnotherTypeAreTheRoundedOnes) {
  const AttentionCase problem = make_random_case(make_shape(2, 1, 16, 16), batch_of_one(70, 70),
                                                 test_config(MaskKind::causal, 16), DType::f32, 6);
  const Upstream upstream = random_upstream(problem, 6);
  const Gradients exact = differentiate(problem, upstream);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    expect_one_answer(problem, {.world_sizes = {2, 4}, .gradient_dtype = dtype}, 6);
    const Gradients rounded = differentiate(problem, upstream, 3, {.dtype = dtype});
    HostTensor expected(dtype, exact.dk.shape());
    expected.fill([&](auto... place) { return exact.dk.at(place...); });
    EXPECT_TRUE(bits_equal(rounded.dk, expected));
  }
}

TEST(RingBackward, ShuffledArrivalAndDelivery) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 16, 16), pack({90, 0, 33}),
                                           test_config(MaskKind::causal, 8), DType::f32, 6);
  problem.config.verify_checksum = true;
  const Upstream upstream = random_upstream(problem, 6);
  const Gradients expected = differentiate(problem, upstream);
  for (const int world_size : {2, 3, 4, 7})
    for (std::int64_t seed = 1; seed <= 4; ++seed) {
      problem.config.shuffle_arrival = seed;
      const Gradients result = differentiate(
          problem, upstream, world_size, {.shuffle_delivery = static_cast<std::uint64_t>(seed)});
      EXPECT_TRUE(same(result, expected)) << describe(problem, world_size);
    }
}

TEST(RingBackward, ThreadsChangeNothing) {
  AttentionCase problem = make_random_case(make_shape(4, 2, 16, 16), pack({120, 45}),
                                           test_config(MaskKind::causal, 16), DType::f32, 7);
  const Upstream upstream = random_upstream(problem, 7);
  const Gradients expected = differentiate(problem, upstream);
  for (const int threads : {2, 3}) {
    problem.config.threads = threads;
    for (const int world_size : {1, 2}) {
      for (const std::int64_t shuffle : {0, 5}) {
        problem.config.shuffle_arrival = shuffle;
        EXPECT_TRUE(same(differentiate(problem, upstream, world_size), expected)) << threads;
      }
    }
  }
}

TEST(RingBackward, DualChunkWhereChunksMeetItsParts) {
  // 96 tokens: parts of 24, 16, 12 at P = 2, 3, 4; 48 and 192 alike.
  for (const MaskKind mask : kMasks)
    expect_one_answer(make_random_case(make_shape(4, 2, 12, 9), pack({96, 0, 48, 192}),
                                       test_config(mask, 2), DType::f32, 8),
                      {.world_sizes = {2, 3, 4}, .shardings = {ShardingKind::dual_chunk}});
}

TEST(RingBackward, DualChunkElsewhereIsOneAnswerPerSize) {
  AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), pack({120, 24}),
                                           test_config(MaskKind::causal, 16), DType::f32, 9);
  problem.config.sharding = ShardingKind::dual_chunk;
  const Upstream upstream = random_upstream(problem, 9);
  for (const int world_size : {2, 3}) {
    const Gradients expected = differentiate(problem, upstream, world_size);
    expect_accurate(problem, upstream, expected, default_kernels());
    for (const std::int64_t shuffle : {1, 2}) {
      problem.config.shuffle_arrival = shuffle;
      EXPECT_TRUE(same(differentiate(problem, upstream, world_size), expected));
    }
    problem.config.shuffle_arrival = 0;
  }
}

TEST(RingBackward, CallsCanBeRepeated) {
  const AttentionCase problem = make_random_case(make_shape(2, 1, 8, 8), pack({60, 21}),
                                                 test_config(MaskKind::causal, 8), DType::f32, 3);
  const Upstream upstream = random_upstream(problem, 3);
  EXPECT_TRUE(
      same(differentiate(problem, upstream, 3, {.repeats = 3}), differentiate(problem, upstream)));
}

TEST(RingBackward, ADocumentAloneEqualsTheDocumentInAPack) {
  const CpConfig config = test_config(MaskKind::causal, 8);
  const AttentionCase packed =
      make_random_case(make_shape(2, 1, 16, 16), pack({31, 64, 7}), config, DType::f32, 8);
  const Upstream upstream = random_upstream(packed, 8, false);
  const Gradients expected = differentiate(packed, upstream, 3);
  std::vector<std::int64_t> rows(64);
  for (std::size_t i = 0; i < 64; ++i) rows[i] = 31 + static_cast<std::int64_t>(i);
  AttentionCase alone = make_case(packed.shape, batch_of_one(64, 64), config);
  alone.q = packed.q.rows(rows);
  alone.k = packed.k.rows(rows);
  alone.v = packed.v.rows(rows);
  const Gradients result = differentiate(alone, {upstream.dout.rows(rows), {}}, 4);
  EXPECT_TRUE(
      same(result, {expected.dq.rows(rows), expected.dk.rows(rows), expected.dv.rows(rows)}));
}

TEST(RingBackward, ArrivalStaysWithinTheBound) {
  for (const NamedBatch& named : small_batches())
    for (const DType dtype : kDTypes)
      for (const int world_size : {1, 2, 3, 7}) {
        AttentionCase problem = make_random_case(make_shape(4, 2, 12, 9), named.batch,
                                                 test_config(MaskKind::causal, 5), dtype, 1);
        problem.config.schedule = ScheduleKind::arrival;
        problem.config.shuffle_arrival = world_size == 7 ? 3 : 0;
        const Upstream upstream = random_upstream(problem, 1);
        SCOPED_TRACE(named.name + ": " + describe(problem, world_size));
        expect_accurate(problem, upstream, differentiate(problem, upstream, world_size),
                        default_kernels());
      }
}

TEST(RingBackward, WhatTravelsIsWhatThePlanSays) {
  const AttentionCase problem = make_random_case(make_shape(4, 2, 16, 8), pack({100, 37}),
                                                 test_config(MaskKind::causal, 8), DType::f32, 2);
  const Upstream upstream = random_upstream(problem, 2);
  LoopbackWorld(3).run([&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), 3);
    const GradientPlan gradient(plan);
    RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
    RingAttention(plan, comm).forward(tensors.forward.views());
    RingGradient backward(plan, gradient, comm);
    backward.backward(tensors.views());
    EXPECT_EQ(backward.ring_stats().bytes_sent + backward.piece_stats().bytes_sent,
              gradient.bytes_on_wire());
    EXPECT_EQ(backward.piece_stats().hops, 2);
  });
}

}  // namespace
}  // namespace cpattn::testing
