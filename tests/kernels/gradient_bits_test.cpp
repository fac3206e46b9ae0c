// What the bits of the backward may depend on: chunks, mask and sums; and what they may not.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/base/error.h"
#include "tests/support/attention_case.h"
#include "tests/support/compare.h"
#include "tests/support/every_table.h"
#include "tests/support/far_tensor.h"
#include "tests/support/run_gradient.h"

namespace cpattn::testing {
namespace {

/// 130 rows, 300 keys, causal; groups of two query heads. Less of it where one CPU executes a GPU's
/// threads.
GradientInputs usual_inputs(DType dtype) {
  const bool is_cpu = tested().tables.front()->device == DeviceKind::cpu;
  const std::int64_t keys = is_cpu ? 300 : 200, kv_heads = is_cpu ? 2 : 1;
  GradientInputs in = random_gradient_inputs(make_shape(2 * kv_heads, kv_heads, 40, 24), 130, keys,
                                             {MaskKind::causal, keys - 129}, dtype, 1);
  for (std::int64_t i = 0; i < 130 * 2 * kv_heads; ++i)
    in.dlse.push_back(random_normal(2, static_cast<std::uint64_t>(i)));
  return in;
}

void expect_equal(const Gradients& actual, const Gradients& expected) {
  EXPECT_TRUE(bits_equal(actual.dq, expected.dq)) << "dq";
  EXPECT_TRUE(bits_equal(actual.dk, expected.dk)) << "dk";
  EXPECT_TRUE(bits_equal(actual.dv, expected.dv)) << "dv";
}

TEST(GradientBits, InstructionSetsOfEqualNumericsAgree) {
  for (const DType dtype : tested().dtypes) {
    const GradientInputs in = usual_inputs(dtype);
    const KernelTable& first = *tested().tables.front();
    const Gradients expected = run_gradient(first, in, {.row_chunk = 100, .key_chunk = 130});
    for (const KernelTable* table : tested().tables) {
      if (table->numerics(dtype) != first.numerics(dtype)) continue;
      SCOPED_TRACE(std::string(table->name) + " " + std::string(name_of(dtype)));
      expect_equal(run_gradient(*table, in, {.row_chunk = 100, .key_chunk = 130}), expected);
    }
  }
}

TEST(GradientBits, ThreadsAndTheOrderOfTasksChangeNothing) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in = usual_inputs(dtype);
    const Gradients expected = run_gradient(table, in, {.row_chunk = 30, .key_chunk = 70});
    for (const int threads : {1, 2, 3}) {
      for (const bool keys_outermost : {false, true}) {
        const GradientRun run{.row_chunk = 30,
                              .key_chunk = 70,
                              .num_threads = threads,
                              .keys_outermost = keys_outermost};
        expect_equal(run_gradient(table, in, run), expected);
      }
    }
  });
}

TEST(GradientBits, StridesChangeNothing) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in = usual_inputs(dtype);
    const Gradients expected = run_gradient(table, in);
    GradientInputs strided = in;
    strided.q = in.q.with_strides({41, 41 * 130, 1});
    strided.k = in.k.with_strides({2 * 40 + 3, 40, 1});
    strided.v = in.v.with_strides({24, 24 * in.keys(), 1});
    strided.dout = in.dout.with_strides({5 * 24, 25, 1});
    expect_equal(run_gradient(table, strided), expected);

    GradientRunner runner(table, in);
    runner.result() = {HostTensor(DType::f32, in.q.shape(), {41, 41 * 130, 1}),
                       HostTensor(DType::f32, in.k.shape(), {2 * 40 + 3, 40, 1}),
                       HostTensor(DType::f32, in.v.shape(), {25, 25 * in.keys(), 1})};
    expect_equal(runner.backward(), expected);
  });
}

// The last row begins past 2^32 elements; a kernel that narrows an offset uses other memory.
TEST(BC_077, GradientsPast32BitsOfElements) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in =
        random_gradient_inputs(make_shape(2, 1, 16, 16), 3, 3, {MaskKind::causal, 1}, dtype, 77);
    const Gradients expected = run_gradient(table, in);
    GradientRunner runner(table, in);
    const FarTensor q(in.q.view()), out(runner.out().view()), dout(in.dout.view());
    PackQueriesArgs pack = runner.pack_args();
    pack.q = q.view();
    pack.out = out.view();
    pack.dout = dout.view();
    table.gradient.pack_queries(pack);

    const FarTensor dq(DType::f32, in.q.shape()), dk(DType::f32, in.k.shape()),
        dv(DType::f32, in.v.shape());
    BackwardArgs args = runner.args();
    args.dq = dq.view();
    const Buffer image = image_of(table.gradient.step_image, args);
    args.image = image.data();
    table.gradient.backward(args);
    SumDkvArgs sums = runner.sum_args();
    sums.dk = dk.view();
    sums.dv = dv.view();
    table.gradient.sum_dkv(sums);
    Gradients result = expected;
    for (auto [far, near] : {std::pair{&dq, &result.dq}, {&dk, &result.dk}, {&dv, &result.dv}}) {
      near->fill([](auto...) { return kNan; });
      far->copy_to(near->view());
    }
    expect_equal(result, expected);
  });
}

TEST(GradientBits, ResultsAreRoundedOnce) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in = usual_inputs(dtype);
    const Gradients exact = run_gradient(table, in);
    for (const DType narrow : {DType::f16, DType::bf16}) {
      const auto rounded = [&](const HostTensor& tensor) {
        return HostTensor(narrow, tensor.shape())
            .fill(
                [&](std::int64_t t, std::int64_t h, std::int64_t d) { return tensor.at(t, h, d); });
      };
      expect_equal(run_gradient(table, in, {.gradient_dtype = narrow}),
                   {rounded(exact.dq), rounded(exact.dk), rounded(exact.dv)});
    }
  });
}

TEST(GradientBits, LaterKeysThatNobodySeesChangeNothing) {
  for_each_table([](const KernelTable& table, DType dtype) {
    GradientInputs in =
        random_gradient_inputs(make_shape(2, 1, 24, 16), 100, 200, {MaskKind::causal, 1}, dtype, 3);
    const Gradients all = run_gradient(table, in, {.key_chunk = 100});
    const HostTensor k = in.k, v = in.v;
    std::vector<std::int64_t> seen;
    for (std::int64_t row = 0; row < 100; ++row) seen.push_back(row);
    in.k = k.rows(seen);
    in.v = v.rows(seen);
    const Gradients few = run_gradient(table, in, {.key_chunk = 100});
    EXPECT_TRUE(bits_equal(all.dq, few.dq));
    EXPECT_TRUE(bits_equal(all.dk.rows(seen), few.dk));
    for (std::int64_t key = 100; key < 200; ++key) EXPECT_EQ(all.dk.bits_at(key, 0, 3), 0u) << key;
  });
}

TEST(GradientBits, ContinuedSlotsAreTheWhole) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in = usual_inputs(dtype);
    const BoundedGradients expected = bounded_gradients(in, table.numerics(dtype));
    const GradientRun run{.row_chunk = 30, .key_chunk = 70, .num_threads = 2, .continues = true};
    const Gradients actual = run_gradient(table, in, run);
    EXPECT_TRUE(expected.dq.accepts(actual.dq));
    EXPECT_TRUE(expected.dk.accepts(actual.dk));
    EXPECT_TRUE(expected.dv.accepts(actual.dv));
  });
}

/// Poison: rows of k, v, q, dout that only pairs nobody sees would touch.
TEST(GradientBits, WhatIsNotSeenCannotPoison) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const BlockMask mask{MaskKind::causal, -20};  // rows 0 to 20 see nothing
    GradientInputs in = random_gradient_inputs(make_shape(2, 1, 24, 16), 90, 150, mask, dtype, 4);
    const Gradients clean = run_gradient(table, in);
    GradientInputs poisoned = in;
    for (const float bad : {kNan, kInf, -kInf}) {
      for (std::int64_t d = 0; d < 24; ++d) {
        for (std::int64_t key = 69; key < 150; ++key) poisoned.k.set(key, 0, d, bad);
        for (std::int64_t row = 0; row <= 20; ++row) poisoned.q.set(row, 1, d, bad);
      }
      for (std::int64_t d = 0; d < 16; ++d) {
        for (std::int64_t key = 69; key < 150; ++key) poisoned.v.set(key, 0, d, bad);
        for (std::int64_t row = 0; row <= 20; ++row) poisoned.dout.set(row, 1, d, bad);
      }
      expect_equal(run_gradient(table, poisoned), clean);
    }
  });
}

/// A NaN in key 30 and in dout of row 60 reaches whoever sees them, and nobody else.
TEST(GradientBits, NanStaysWithThosePairsThatSeeIt) {
  for_each_table([](const KernelTable& table, DType dtype) {
    GradientInputs in =
        random_gradient_inputs(make_shape(2, 1, 24, 16), 90, 150, {MaskKind::causal, 1}, dtype, 5);
    const Gradients clean = run_gradient(table, in);
    GradientInputs bad_key = in;
    bad_key.k.set(30, 0, 5, kNan);
    const Gradients key = run_gradient(table, bad_key);
    for (std::int64_t row = 0; row < 90; ++row) {
      EXPECT_EQ(std::isnan(key.dq.at(row, 1, 7)), row >= 30) << row;
      if (row < 30) {
        EXPECT_EQ(key.dq.bits_at(row, 1, 7), clean.dq.bits_at(row, 1, 7)) << row;
      }
    }
    GradientInputs bad_row = in;
    bad_row.dout.set(60, 1, 5, kNan);
    const Gradients row = run_gradient(table, bad_row);
    for (std::int64_t j = 0; j < 150; ++j) {
      EXPECT_EQ(std::isnan(row.dv.at(j, 0, 5)), j <= 60) << j;
      EXPECT_EQ(std::isnan(row.dk.at(j, 0, 5)), j <= 60) << j;
      if (j > 60) {
        EXPECT_EQ(row.dv.bits_at(j, 0, 5), clean.dv.bits_at(j, 0, 5)) << j;
      }
    }
    for (std::int64_t i = 0; i < 90; ++i) EXPECT_EQ(std::isnan(row.dq.at(i, 1, 5)), i == 60) << i;
  });
}

TEST(GradientBits, ANanInAQueryIsNotLostToAScaleOfZero) {
  for_each_table([](const KernelTable& table, DType dtype) {
    GradientInputs in = usual_inputs(dtype);
    in.shape.softmax_scale = 0.0;
    in.q.set(57, 1, 4, kNan);
    const Gradients result = run_gradient(table, in);
    EXPECT_TRUE(std::isnan(result.dq.at(57, 1, 0)));
    EXPECT_TRUE(std::isnan(result.dv.at(0, 0, 0)));
    EXPECT_EQ(result.dq.at(56, 1, 0), 0.0f);
  });
}

TEST(GradientBits, ProgressIsCalledOftenAndByTheCaller) {
  struct Calls {
    std::thread::id caller;
    int total = 0;
    int elsewhere = 0;
  };
  // 60 rows and 513 keys are at least two row tiles of five key tiles, for each of two heads.
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in =
        random_gradient_inputs(make_shape(2, 1, 24, 17), 60, 513, {}, dtype, 6);
    for (const int threads : {1, 2}) {
      Calls calls{std::this_thread::get_id()};
      const ProgressHook progress{[](void* context) noexcept {
                                    auto* seen = static_cast<Calls*>(context);
                                    ++seen->total;
                                    if (std::this_thread::get_id() != seen->caller)
                                      ++seen->elsewhere;
                                  },
                                  &calls};
      run_gradient(table, in, {.key_chunk = 200, .num_threads = threads, .progress = progress});
      if (threads == 1 && table.device == DeviceKind::cpu) {
        EXPECT_GE(calls.total, 2 * 2 * 5);
      }
      EXPECT_EQ(calls.elsewhere, 0);
    }
  });
}

TEST(GradientBits, WhatDoesNotFitIsRefusedUntouched) {
  for_each_table([](const KernelTable& table, DType dtype) {
    const GradientInputs in = usual_inputs(dtype);
    GradientRunner runner(table, in, {.row_chunk = 30, .key_chunk = 70});
    const auto refuses = [&](auto&& change) {
      BackwardArgs args = runner.args();
      std::vector<GradientTask> tasks(args.tasks.begin(), args.tasks.end());
      args.tasks = tasks;
      change(args, tasks);
      EXPECT_THROW(table.gradient.backward(args), InvalidArgument);
      EXPECT_TRUE(std::isnan(runner.result().dq.at(0, 0, 0)));
    };
    refuses([](auto& args, auto&) { args.dq.shape[2] = 39; });
    refuses([](auto& args, auto&) { ++args.dq.shape[1]; });
    refuses([](auto& args, auto&) { args.dq.shape[0] = 129; });
    refuses([](auto& args, auto&) { args.dq.strides[2] = 2; });
    refuses([&](auto& args, auto&) { args.limits.keys = in.keys() - 1; });
    refuses([](auto& args, auto&) { args.limits.block_keys = 69; });
    refuses([](auto& args, auto&) { --args.limits.kv_blocks; });
    refuses([](auto& args, auto&) { args.limits.q_blocks = 4; });
    refuses([](auto& args, auto&) { args.problem.max_chunk_rows = 29; });
    refuses([](auto&, auto& tasks) { tasks.back().q_chunk = 5; });
    refuses([](auto&, auto& tasks) { tasks.back().kv_block = -1; });
    refuses([](auto&, auto& tasks) { tasks.back().dkv = 50; });
    refuses([](auto&, auto& tasks) { tasks.back().dq = scratch_slot(1); });
    refuses([](auto&, auto& tasks) { tasks.back().continues_dkv = true; });

    const auto refuses_queries = [&](auto&& change) {
      PackQueriesArgs args = runner.pack_args();
      change(args);
      EXPECT_THROW(table.gradient.pack_queries(args), InvalidArgument);
    };
    refuses_queries([](auto& args) { args.q.shape[2] = 39; });
    refuses_queries([](auto& args) { args.out.shape[0] = 129; });
    refuses_queries([](auto& args) { args.dout.shape[2] = 25; });
    refuses_queries([](auto& args) { ++args.lse.shape[1]; });
    refuses_queries([](auto& args) { args.dlse.shape[0] = 3; });

    const auto refuses_sums = [&](auto&& change) {
      SumDkvArgs args = runner.sum_args();
      std::vector<DkvOp> ops(args.ops.begin(), args.ops.end());
      args.ops = ops;
      change(args, ops);
      EXPECT_THROW(table.gradient.sum_dkv(args), InvalidArgument);
      EXPECT_TRUE(std::isnan(runner.result().dk.at(0, 0, 0)));
    };
    refuses_sums([](auto& args, auto&) { args.dk.shape[2] = 39; });
    refuses_sums([](auto& args, auto&) { --args.dv.shape[0]; });
    refuses_sums([](auto&, auto& ops) { ops.back().kv_chunk = 50; });
    refuses_sums([](auto&, auto& ops) { ops.back().left = nullptr; });
    EXPECT_NO_THROW(runner.backward());
    EXPECT_FALSE(std::isnan(runner.result().dq.at(0, 0, 0)));
  });
}

}  // namespace
}  // namespace cpattn::testing
