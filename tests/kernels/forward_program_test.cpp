// Programs of more than one op: merges, carried slots, accumulation, empty rows, progress,
// refusals.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "src/base/error.h"
#include "tests/support/compare.h"
#include "tests/support/error_bound.h"
#include "tests/support/every_table.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {
namespace {

/// 60 rows over 220 keys in chunks of 100, 100 and 20, causal.
constexpr std::array<std::int64_t, 3> kChunks{100, 100, 20};

AttentionCase three_chunks(DType dtype) {
  return make_random_case(make_shape(2, 1, 24, 17), batch_of_one(60, 220),
                          test_config(MaskKind::causal, 100), dtype, 3);
}

KernelProblem kernel_problem_of(const AttentionCase& problem) {
  return {.shape = problem.shape,
          .dtype = problem.dtype,
          .max_chunk_rows = problem.batch.q_rows,
          .num_threads = 2};
}

StateOp block_op(const AttentionCase& problem, StateOpKind kind, SlotIndex dst, int chunk) {
  return {.kind = kind, .dst = dst, .kv_block = chunk, .mask = block_mask(problem, 0, 100 * chunk)};
}
StateOp merge_op(SlotIndex dst, SlotIndex left, SlotIndex right) {
  return {.kind = StateOpKind::merge, .dst = dst, .left = left, .right = right, .mask = {}};
}
StateOp finalize_op(SlotIndex slot) {
  return {.kind = StateOpKind::finalize, .left = slot, .mask = {}};
}

/// Runs each list of ops as one forward() call over the same carried slots.
Attended run_calls(const KernelTable& table, const AttentionCase& problem,
                   const std::vector<std::vector<StateOp>>& calls) {
  Attended result = unset_result(problem);
  KernelRunner runner(table, kernel_problem_of(problem), problem.k.view(), problem.v.view(),
                      kChunks);
  for (const std::vector<StateOp>& ops : calls) {
    const QueryProgram program{0, problem.batch.q_rows, ops};
    runner.forward({.q = problem.q.view(),
                    .out = result.out.view(),
                    .lse = lse_view(result),
                    .programs = std::span(&program, 1),
                    .num_scratch_slots = 3,
                    .num_carried_slots = 3});
  }
  return result;
}

const SlotIndex kA = scratch_slot(0), kB = scratch_slot(1), kC = scratch_slot(2);

std::vector<StateOp> canonical_program(const AttentionCase& problem) {
  return {block_op(problem, StateOpKind::block, kA, 0),
          block_op(problem, StateOpKind::block, kB, 1),
          merge_op(kA, kA, kB),
          block_op(problem, StateOpKind::block, kB, 2),
          merge_op(kA, kA, kB),
          finalize_op(kA)};
}

TEST(ForwardProgram, MergedChunksAreTheWhole) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    const Attended result = run_calls(table, problem, {canonical_program(problem)});
    EXPECT_TRUE(near_reference(problem, result, error_model(table, dtype, dtype)));
  });
}

TEST(ForwardProgram, SlotsAndCallsDoNotChangeBits) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    const Attended expected = run_calls(table, problem, {canonical_program(problem)});
    // The same tree, its leaves in another order, over three calls, in carried slots.
    const Attended result = run_calls(table, problem,
                                      {{block_op(problem, StateOpKind::block, 2, 2)},
                                       {block_op(problem, StateOpKind::block, 1, 1)},
                                       {block_op(problem, StateOpKind::block, kC, 0),
                                        merge_op(0, kC, 1), merge_op(kB, 0, 2), finalize_op(kB)}});
    EXPECT_TRUE(bits_equal(result.out, expected.out));
    EXPECT_TRUE(bits_equal(result.lse, expected.lse));
  });
}

TEST(ForwardProgram, AccumulationInAnyOrderIsTheWhole) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    const Attended result =
        run_calls(table, problem,
                  {{block_op(problem, StateOpKind::block, 0, 2)},
                   {block_op(problem, StateOpKind::accumulate, 0, 0),
                    block_op(problem, StateOpKind::accumulate, 0, 1), finalize_op(0)}});
    EXPECT_TRUE(near_reference(problem, result, error_model(table, dtype, dtype)));
  });
}

TEST(ForwardProgram, AnInvisibleChunkIsNeutralOnEitherSide) {
  for_each_table([](const KernelTable& table, DType dtype) {
    AttentionCase problem = three_chunks(dtype);
    StateOp hidden = block_op(problem, StateOpKind::block, kB, 1);
    hidden.mask = {MaskKind::causal, -1000};
    const StateOp seen = block_op(problem, StateOpKind::block, kA, 0);
    const Attended alone = run_calls(table, problem, {{seen, finalize_op(kA)}});
    const Attended left =
        run_calls(table, problem, {{seen, hidden, merge_op(kC, kA, kB), finalize_op(kC)}});
    const Attended right =
        run_calls(table, problem, {{seen, hidden, merge_op(kC, kB, kA), finalize_op(kC)}});
    StateOp more = hidden;
    more.kind = StateOpKind::accumulate;
    more.dst = kA;
    const Attended accumulated = run_calls(table, problem, {{seen, more, finalize_op(kA)}});
    for (const Attended* result : {&left, &right, &accumulated}) {
      EXPECT_TRUE(bits_equal(result->out, alone.out));
      EXPECT_TRUE(bits_equal(result->lse, alone.lse));
    }
  });
}

TEST(ForwardProgram, TwoEmptyStatesMergeToAnEmptyRow) {
  for_each_table([](const KernelTable& table, DType dtype) {
    AttentionCase problem = three_chunks(dtype);
    StateOp hidden = block_op(problem, StateOpKind::block, kA, 0);
    hidden.mask = {MaskKind::causal, -1000};
    StateOp also_hidden = hidden;
    also_hidden.dst = kB;
    const Attended merged =
        run_calls(table, problem, {{hidden, also_hidden, merge_op(kA, kA, kB), finalize_op(kA)}});
    const Attended stated =
        run_calls(table, problem, {{{.kind = StateOpKind::finalize_empty, .mask = {}}}});
    EXPECT_TRUE(bits_equal(merged.out, stated.out));
    EXPECT_TRUE(bits_equal(merged.lse, stated.lse));
    EXPECT_EQ(stated.out.bits_at(59, 1, 16), 0u);
    EXPECT_EQ(stated.lse[119], -kInf);
  });
}

TEST(ForwardProgram, RowsWithoutAProgramAreLeftAlone) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    Attended result = unset_result(problem);
    KernelRunner runner(table, kernel_problem_of(problem), problem.k.view(), problem.v.view(),
                        kChunks);
    const std::vector<StateOp> ops = canonical_program(problem);
    const QueryProgram program{20, 10, ops};
    runner.forward({.q = problem.q.view(),
                    .out = result.out.view(),
                    .lse = lse_view(result),
                    .programs = std::span(&program, 1),
                    .num_scratch_slots = 3,
                    .num_carried_slots = 3});
    for (std::int64_t row = 0; row < 60; ++row) {
      const bool is_computed = row >= 20 && row < 30;
      EXPECT_EQ(!std::isnan(result.out.at(row, 1, 3)), is_computed) << row;
      EXPECT_EQ(!std::isnan(result.lse[static_cast<std::size_t>(2 * row + 1)]), is_computed) << row;
    }
  });
}

TEST(ForwardProgram, ProgressIsCalledOftenAndByTheCaller) {
  struct Calls {
    std::thread::id caller;
    int total = 0;
    int elsewhere = 0;
  };
  // 513 keys are at least five key tiles of any size up to 128; 2 heads x 2 row tiles of work.
  for_each_table([](const KernelTable& table, DType dtype) {
    if (table.device != DeviceKind::cpu) return;  // there the caller's thread is free
    const AttentionCase problem = make_random_case(make_shape(2, 1, 24, 17), batch_of_one(60, 513),
                                                   test_config(MaskKind::full, 1024), dtype, 3);
    Attended result = unset_result(problem);
    KernelProblem kernel_problem = kernel_problem_of(problem);
    for (const int threads : {1, 2}) {
      kernel_problem.num_threads = threads;
      constexpr std::array<std::int64_t, 1> kAll{513};
      KernelRunner runner(table, kernel_problem, problem.k.view(), problem.v.view(), kAll);
      const std::vector<StateOp> ops{block_op(problem, StateOpKind::block, kA, 0), finalize_op(kA)};
      const QueryProgram program{0, 60, ops};
      Calls calls{std::this_thread::get_id()};
      runner.forward({.q = problem.q.view(),
                      .out = result.out.view(),
                      .lse = lse_view(result),
                      .programs = std::span(&program, 1),
                      .progress = {[](void* context) noexcept {
                                     auto* seen = static_cast<Calls*>(context);
                                     ++seen->total;
                                     if (std::this_thread::get_id() != seen->caller)
                                       ++seen->elsewhere;
                                   },
                                   &calls}});
      if (threads == 1) {
        EXPECT_GE(calls.total, 2 * 2 * 5);
      }
      EXPECT_EQ(calls.elsewhere, 0);
    }
  });
}

TEST(ForwardProgram, TensorsThatDoNotFitAreRefusedUntouched) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    Attended result = unset_result(problem);
    KernelRunner runner(table, kernel_problem_of(problem), problem.k.view(), problem.v.view(),
                        kChunks);
    const std::vector<StateOp> ops = canonical_program(problem);
    const QueryProgram program{0, 60, ops};
    const KernelRunner::Call good{.q = problem.q.view(),
                                  .out = result.out.view(),
                                  .lse = lse_view(result),
                                  .programs = std::span(&program, 1),
                                  .num_scratch_slots = 3,
                                  .num_carried_slots = 3};
    const auto refuses = [&](auto&& change) {
      KernelRunner::Call call = good;
      change(call);
      EXPECT_THROW(runner.forward(call), InvalidArgument);
      EXPECT_TRUE(std::isnan(result.out.at(0, 0, 0)));
    };
    refuses([](auto& call) { call.q.shape[2] = 23; });
    refuses([](auto& call) { call.q.shape[1] = 3; });
    refuses([](auto& call) { call.q.strides[2] = 2; });
    refuses([&](auto& call) { call.q.dtype = dtype == DType::f32 ? DType::f16 : DType::f32; });
    refuses([](auto& call) { call.out.shape[2] = 18; });
    refuses([](auto& call) { call.out.shape[0] = 59; });
    refuses([](auto& call) { call.lse.shape[1] = 1; });
    EXPECT_NO_THROW(runner.forward(good));
    EXPECT_FALSE(std::isnan(result.out.at(0, 0, 0)));
  });
}

TEST(ForwardProgram, KeysThatDoNotFitAreRefused) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const AttentionCase problem = three_chunks(dtype);
    const KernelProblem kernel_problem = kernel_problem_of(problem);
    const auto pack = [&](const HostTensor& k, const HostTensor& v) {
      KernelRunner(table, kernel_problem, k.view(), v.view(), kChunks);
    };
    EXPECT_NO_THROW(pack(problem.k, problem.v));
    EXPECT_THROW(pack(problem.q, problem.v), InvalidArgument);
    EXPECT_THROW(pack(problem.k, problem.k), InvalidArgument);
    const DType other = dtype == DType::f32 ? DType::bf16 : DType::f32;
    EXPECT_THROW(pack(HostTensor(other, problem.k.shape()), problem.v), InvalidArgument);
  });
}

}  // namespace
}  // namespace cpattn::testing
