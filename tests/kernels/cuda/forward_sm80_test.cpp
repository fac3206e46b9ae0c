// What only this kernel has to show: it is right however threads are ordered and copies land, and
// every barrier and wait of its is needed. Its results are judged by the tests of all backends.
#include "kernels/cuda/forward_sm80.h"

#include <bit>
#include <limits>
#include <vector>

#include "kernels/cuda/check_args.h"
#include "kernels/cuda/forward_sm80.cuh"
#include "kernels/cuda/kernel_table.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/error_bound.h"
#include "tests/support/run_kernels.h"

namespace cpattn::cuda {
namespace {

using testing::Attended;
using testing::AttentionCase;
using testing::bits_equal;
using testing::block_mask;
using testing::KernelRunner;
using testing::kNan;

constexpr std::int64_t kOneChunk = 1 << 20;

class ForwardSm80 : public HostTest {
 protected:
  void SetUp() override {
    HostTest::SetUp();
    testing::tested().stream = {static_cast<cudaStream_t>(&executor_)};
  }
  void TearDown() override {
    testing::tested().stream = {};
    HostTest::TearDown();
  }

  static AttentionCase causal_case(const AttentionShape& shape, std::int64_t rows,
                                   std::int64_t keys, DType dtype) {
    return testing::make_random_case(shape, batch_of_one(rows, keys),
                                     testing::test_config(MaskKind::causal, kOneChunk), dtype, 7);
  }
  static Attended run(const AttentionCase& problem, int num_blocks = 2) {
    return testing::run_one_block(sm80_kernels(), problem, {.num_threads = num_blocks});
  }
};

TEST_F(ForwardSm80, EveryConfigurationInAllModes) {
  // One, two and four panels; a row tile and a bit, two key tiles and a bit.
  for (const std::int64_t dim : {40, 128, 192}) {
    const AttentionCase problem =
        causal_case(testing::make_shape(1, 1, dim, 64), 70, 131, DType::bf16);
    const testing::Oracle oracle(problem);
    const Attended first = run(problem);
    EXPECT_TRUE(oracle.accepts(
        first, testing::error_model(sm80_kernels(), DType::bf16, problem.out_dtype)));
    in_all_modes([&] {
      const Attended result = run(problem);
      EXPECT_TRUE(bits_equal(result.out, first.out));
      EXPECT_TRUE(bits_equal(result.lse, first.lse));
    });
  }
}

TEST_F(ForwardSm80, FitsTheLeastSharedMemoryWithoutBankConflicts) {
  executor_.set_options({.max_shared_bytes = 99 * 1024});
  for (const auto& [dim, value_dim] : {std::pair{64, 64}, {128, 128}, {256, 256}, {256, 8}}) {
    executor_.reset_counters();
    run(causal_case(testing::make_shape(1, 1, dim, value_dim), 17, 65, DType::f16));
    EXPECT_GT(executor_.counters().ldmatrix_phases, 0u);
    EXPECT_EQ(executor_.counters().ldmatrix_conflicts, 0u) << dim << " " << value_dim;
  }
}

TEST_F(ForwardSm80, BlocksAreAsManyAsWorkAtATime) {
  const AttentionCase problem = causal_case(testing::make_shape(3, 1, 16, 16), 200, 70, DType::f16);
  const Attended one = run(problem, 1);
  for (const int num_blocks : {2, 5, 100}) {
    executor_.reset_counters();
    const Attended result = run(problem, num_blocks);
    EXPECT_TRUE(bits_equal(result.out, one.out));
    EXPECT_TRUE(bits_equal(result.lse, one.lse));
    // 3 heads x 2 tiles of 128 rows; packing has one block for each of 2 x 2 panels.
    EXPECT_EQ(executor_.counters().blocks, static_cast<std::uint64_t>(std::min(num_blocks, 6) + 4));
  }
}

/// Two chunks of keys whose states are carried as they are, and merged in the epilogue.
TEST_F(ForwardSm80, AMergeInTheEpilogueHasTheBitsOfMergeStates) {
  constexpr std::int64_t kRows = 70, kHeads = 2, kDim = 30;
  constexpr std::array<std::int64_t, 2> kChunks{100, 40};
  AttentionCase problem =
      causal_case(testing::make_shape(kHeads, 1, 24, kDim), kRows, 140, DType::bf16);
  problem.out_dtype = DType::f32;
  const KernelProblem kernel_problem{
      .shape = problem.shape, .dtype = DType::bf16, .max_chunk_rows = kRows, .num_threads = 2};
  const auto block = [&](SlotIndex dst, int chunk) {
    return StateOp{.kind = StateOpKind::block,
                   .dst = dst,
                   .kv_block = chunk,
                   .mask = block_mask(problem, 0, 100 * chunk)};
  };
  const auto run_ops = [&](const std::vector<StateOp>& ops, Attended& result,
                           KernelRunner& runner) {
    const QueryProgram program{0, kRows, ops};
    runner.forward({.q = problem.q.view(),
                    .out = result.out.view(),
                    .lse = testing::lse_view(result),
                    .programs = std::span(&program, 1),
                    .num_scratch_slots = 2,
                    .num_carried_slots = 2});
  };
  const auto merge = [](SlotIndex left, SlotIndex right) {
    return StateOp{
        .kind = StateOpKind::merge, .dst = left, .left = left, .right = right, .mask = {}};
  };
  const auto finalize = [](SlotIndex slot) {
    return StateOp{.kind = StateOpKind::finalize, .left = slot, .mask = {}};
  };
  in_all_modes([&] {
    KernelRunner runner(sm80_kernels(), kernel_problem, problem.k.view(), problem.v.view(),
                        kChunks);
    Attended kept = testing::unset_result(problem);
    run_ops({block(0, 0), block(1, 1)}, kept, runner);
    // Slots and their merge, by the kernels of states.h.
    const StateShape shape = carried_shape(kernel_problem);
    const std::size_t bytes = state_slot_bytes(shape);
    const StateSlot left = state_slot_at(shape, runner.carried()),
                    right = state_slot_at(shape, runner.carried() + bytes);
    const Buffer memory(bytes);
    const StateSlot merged = state_slot_at(shape, memory.data());
    merge_states(shape, left, right, merged, &executor_);
    Attended expected = testing::unset_result(problem);
    finalize_states(
        shape, merged,
        {expected.out.view().data, DType::f32, kHeads * kDim, kDim, expected.lse.data(), kHeads, 1},
        &executor_);
    const SlotIndex a = scratch_slot(0), b = scratch_slot(1);
    const std::vector<StateOp> programs[] = {
        {block(a, 0), block(b, 1), merge(a, b), finalize(a)},  // slot on the left
        {block(b, 1), block(a, 0), merge(a, b), finalize(a)},  // slot on the right
        {merge(0, 1), finalize(0)}};                           // loaded
    for (const std::vector<StateOp>& ops : programs) {
      Attended result = testing::unset_result(problem);
      run_ops(ops, result, runner);
      EXPECT_TRUE(bits_equal(result.out, expected.out));
      EXPECT_TRUE(bits_equal(result.lse, expected.lse));
    }
  });
}

TEST_F(ForwardSm80, HeadMaximaAreThoseOfTheVisibleLogits) {
  constexpr std::int64_t kRows = 80, kKeys = 75, kHeads = 3;
  AttentionCase problem =
      causal_case(testing::make_shape(kHeads, 1, 16, 16), kRows, kKeys, DType::bf16);
  problem.shape.softmax_scale = -0.5;
  // The last key would be the largest logit of all rows, but only the last row sees it.
  problem.k.fill([&](std::int64_t t, std::int64_t h, std::int64_t d) {
    return t == kKeys - 1 ? -8.0f : problem.k.at(t, h, d);
  });
  for (std::int64_t h = 0; h < kHeads; ++h)
    for (std::int64_t d = 0; d < 16; ++d) problem.q.set(kRows - 1, h, d, 0.0f);
  for (std::int64_t row = 0; row < kRows; ++row)
    for (std::int64_t d = 0; d < 16; ++d) problem.q.set(row, 2, d, kNan);
  const auto run_with = [&](std::vector<float>& maxima) {
    const KernelProblem kernel_problem{
        .shape = problem.shape, .dtype = DType::bf16, .max_chunk_rows = kRows, .num_threads = 4};
    const std::int64_t keys = kKeys;
    KernelRunner runner(sm80_kernels(), kernel_problem, problem.k.view(), problem.v.view(),
                        {&keys, 1});
    const StateOp ops[] = {
        {.kind = StateOpKind::block, .dst = -1, .kv_block = 0, .mask = block_mask(problem, 0, 0)},
        {.kind = StateOpKind::finalize, .left = -1, .mask = {}}};
    const QueryProgram program{0, kRows, ops};
    Attended result = testing::unset_result(problem);
    runner.forward({.q = problem.q.view(),
                    .out = result.out.view(),
                    .lse = testing::lse_view(result),
                    .programs = {&program, 1},
                    .head_maxima = maxima.data()});
  };
  double expected = -std::numeric_limits<double>::infinity();  // of head 0
  for (std::int64_t row = 5; row < kRows; ++row)
    for (std::int64_t key = 0; key <= row - 5; ++key) {
      double logit = 0.0;
      for (std::int64_t d = 0; d < 16; ++d) {
        logit += static_cast<double>(problem.q.at(row, 0, d)) *
                 static_cast<double>(problem.k.at(key, 0, d));
      }
      expected = std::max(expected, -0.5 * logit);
    }
  in_all_modes([&] {
    std::vector<float> maxima{-testing::kInf, 1e6f, -testing::kInf};
    run_with(maxima);
    EXPECT_NEAR(maxima[0], expected, 22 * testing::kUnitRoundoff * 64);  // |q| |k| / 2 < 64
    EXPECT_EQ(maxima[1], 1e6f);                                          // larger already
    EXPECT_TRUE(std::isnan(maxima[2]));
    run_with(maxima);
    EXPECT_TRUE(std::isnan(maxima[2]));
  });
}

TEST_F(ForwardSm80, RowsWithoutKeysAreNotObserved) {
  AttentionCase problem = causal_case(testing::make_shape(1, 1, 8, 8), 20, 20, DType::f16);
  const std::int64_t keys = 20;
  const KernelProblem kernel_problem{
      .shape = problem.shape, .dtype = DType::f16, .max_chunk_rows = 20};
  KernelRunner runner(sm80_kernels(), kernel_problem, problem.k.view(), problem.v.view(),
                      {&keys, 1});
  const StateOp ops[] = {{.kind = StateOpKind::finalize_empty, .mask = {}}};
  const QueryProgram program{0, 20, ops};
  Attended result = testing::unset_result(problem);
  float maximum = -testing::kInf;
  runner.forward({.q = problem.q.view(),
                  .out = result.out.view(),
                  .lse = testing::lse_view(result),
                  .programs = {&program, 1},
                  .head_maxima = &maximum});

  EXPECT_EQ(maximum, -testing::kInf);
}

}  // namespace
}  // namespace cpattn::cuda
