// The f32 forward against the CPU's f32 engine: the same bits of out and lse, and of every state.
#include "kernels/cuda/forward_f32.h"

#include <bit>
#include <cmath>
#include <vector>

#include "kernels/cpu/tile_kernels.h"
#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/states.h"
#include "kernels/f32_engine.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/run_kernels.h"

namespace cpattn::cuda {
namespace {

using testing::Attended;
using testing::AttentionCase;
using testing::bits_equal;
using testing::HostTensor;
using testing::KernelRunner;
using testing::kInf;
using testing::kNan;

constexpr std::int64_t kOneChunk = 1 << 20;
/// As little shared memory as any of the architectures has.
constexpr std::size_t kLeastSharedBytes = 99 * 1024;

const KernelTable& cpu_table() { return *available_kernels().front(); }

class ForwardF32 : public HostTest {
 protected:
  void SetUp() override {
    HostTest::SetUp();
    executor_.set_options({.max_shared_bytes = kLeastSharedBytes});
    testing::tested().stream = {static_cast<cudaStream_t>(&executor_)};
  }
  void TearDown() override {
    testing::tested().stream = {};
    HostTest::TearDown();
  }
};

void expect_same(const Attended& actual, const Attended& expected) {
  EXPECT_TRUE(bits_equal(actual.out, expected.out));
  EXPECT_TRUE(bits_equal(actual.lse, expected.lse));
}

struct Shape {
  std::int64_t rows, keys, heads, kv_heads, dim, value_dim;
};

AttentionCase make_problem(const Shape& it, MaskKind mask, std::uint64_t seed) {
  return testing::make_random_case(testing::make_shape(it.heads, it.kv_heads, it.dim, it.value_dim),
                                   batch_of_one(it.rows, it.keys),
                                   testing::test_config(mask, kOneChunk), DType::f32, seed);
}

/// The CPU's kernels get one thread: the thread sanitizer does not know OpenMP's barriers.
int blocks_of(const KernelTable& table, int num_blocks) {
  return table.device == DeviceKind::cpu ? 1 : num_blocks;
}

void expect_bits_of_cpu(const AttentionCase& problem, int num_threads = 2) {
  expect_same(run_one_block(sm80_kernels(), problem, {.num_threads = num_threads}),
              run_one_block(cpu_table(), problem));
}

TEST_F(ForwardF32, NamesTheArithmeticOfTheCpu) {
  EXPECT_EQ(sm80_kernels().numerics(DType::f32), cpu_table().numerics(DType::f32));
}

TEST_F(ForwardF32, HeadSizes) {
  std::uint64_t seed = 1;
  for (const auto& [dim, value_dim] :
       {std::pair{1, 1}, {8, 40}, {40, 8}, {64, 64}, {65, 63}, {96, 128}, {256, 130}, {30, 256}}) {
    SCOPED_TRACE(::testing::Message() << dim << " and " << value_dim);
    expect_bits_of_cpu(make_problem({40, 150, 2, 1, dim, value_dim}, MaskKind::causal, ++seed));
  }
}

TEST_F(ForwardF32, LengthsAroundTiles) {
  std::uint64_t seed = 20;
  for (const auto& [rows, keys] : {std::pair{1, 1}, {63, 127}, {64, 128}, {65, 129}, {130, 7}}) {
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << keys << " keys");
      expect_bits_of_cpu(make_problem({rows, keys, 1, 1, 16, 16}, mask, ++seed));
    }
  }
}

TEST_F(ForwardF32, EveryWayToExecuteIt) {
  const AttentionCase problem = make_problem({70, 200, 4, 2, 20, 12}, MaskKind::causal, 40);
  const Attended expected = run_one_block(cpu_table(), problem);
  in_all_modes([&] { expect_same(run_one_block(sm80_kernels(), problem), expected); });
}

TEST_F(ForwardF32, AnyNumberOfThreadBlocks) {
  const AttentionCase problem = make_problem({150, 60, 3, 1, 8, 8}, MaskKind::full, 41);
  for (const int blocks : {1, 2, 5, 100}) expect_bits_of_cpu(problem, blocks);
  EXPECT_EQ(executor_.counters().blocks, 4u * 8 + 1 + 2 + 5 + 9);  // 8 to pack; 9 tiles
}

TEST_F(ForwardF32, ScalesAndTypesOfOut) {
  AttentionCase problem = make_problem({50, 90, 2, 2, 12, 10}, MaskKind::causal, 42);
  for (const double scale : {-0.3, 0.0, 30.0}) {
    problem.shape.softmax_scale = scale;
    expect_bits_of_cpu(problem);
  }
  problem.q.set(7, 1, 3, kNan);  // not lost to a scale of 0
  problem.shape.softmax_scale = 0.0;
  EXPECT_TRUE(std::isnan(run_one_block(sm80_kernels(), problem).out.at(7, 1, 0)));
  problem = make_problem({50, 90, 2, 2, 12, 10}, MaskKind::causal, 43);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    problem.out_dtype = dtype;
    expect_bits_of_cpu(problem);
  }
}

TEST_F(ForwardF32, ExtremeLogits) {
  AttentionCase problem = make_problem({40, 300, 1, 1, 24, 24}, MaskKind::causal, 44);
  problem.q.fill_normal(45, 300.0f);
  expect_bits_of_cpu(problem);
  problem.q.fill_normal(46, 1e-30f);
  problem.k.fill_normal(47, 1e-12f);  // products that underflow
  expect_bits_of_cpu(problem);
}

TEST_F(ForwardF32, EmptyRowsAndHiddenPoison) {
  AttentionCase problem = make_problem({100, 70, 2, 1, 20, 20}, MaskKind::causal, 48);
  const Attended expected = run_one_block(cpu_table(), problem);  // rows 0 to 29 see nothing
  EXPECT_EQ(expected.lse[0], -kInf);
  expect_bits_of_cpu(problem);
  for (const float poison : {kNan, kInf, -kInf}) {
    AttentionCase poisoned = problem;
    for (std::int64_t key = 50; key < 70; ++key) {
      poisoned.k.set(key, 0, 3, poison);
      poisoned.v.set(key, 0, 19, poison);
    }
    const Attended result = run_one_block(sm80_kernels(), poisoned);
    for (std::int64_t row = 0; row < 80; ++row) {
      for (std::int64_t d = 0; d < 20; ++d) {
        ASSERT_EQ(result.out.bits_at(row, 1, d), expected.out.bits_at(row, 1, d)) << row;
      }
    }
    EXPECT_TRUE(std::isnan(result.out.at(99, 0, 19)));
  }
}

TEST_F(ForwardF32, StridesAndPoisonedPadding) {
  const AttentionCase problem = make_problem({66, 130, 2, 2, 19, 13}, MaskKind::causal, 49);
  const HostTensor q = problem.q.with_strides({2 * 23 + 5, 23, 1});
  const HostTensor k = problem.k.with_strides({2 * 20, 20, 1});
  const HostTensor v = problem.v.with_strides({15, 15 * 130, 1});  // heads outermost
  HostTensor out(DType::f32, {66, 2, 13}, {2 * 17 + 3, 17, 1});
  std::vector<float> lse(66 * 7, kNan);
  testing::run_one_block(sm80_kernels(), problem,
                         {q.view(), k.view(), v.view(), out.view(), {lse.data(), {66, 2}, {7, 1}}});
  const Attended expected = run_one_block(cpu_table(), problem);
  EXPECT_TRUE(bits_equal(out.with_strides({26, 13, 1}), expected.out));
  for (std::size_t row = 0; row < 66; ++row)
    for (std::size_t head = 0; head < 7; ++head) {
      const float given = lse[row * 7 + head];
      if (head < 2) {
        EXPECT_EQ(given, expected.lse[row * 2 + head]);
      } else {
        EXPECT_TRUE(std::isnan(given));
      }
    }
}

/// Two documents of 70 and 20 rows in one q, over chunks of 100, 130 and 40 keys, merged in scratch
/// and carried slots over three calls.
class ForwardF32Programs : public ForwardF32 {
 protected:
  static constexpr std::int64_t kRows[] = {70, 20}, kKeys[] = {100, 130, 40};
  static constexpr std::int64_t kHeads = 2, kDim = 24, kValueDim = 18;

  static StateOp block(StateOpKind kind, SlotIndex dst, int kv, MaskKind mask, std::int64_t limit) {
    return {.kind = kind, .dst = dst, .kv_block = kv, .mask = {mask, limit}};
  }
  static StateOp merge(SlotIndex dst, SlotIndex left, SlotIndex right) {
    return {.kind = StateOpKind::merge, .dst = dst, .left = left, .right = right};
  }
  static StateOp finalize(SlotIndex left) { return {.kind = StateOpKind::finalize, .left = left}; }

  /// Ops by call and program. A state is read once, so slots hold what was not read yet.
  std::vector<std::vector<std::vector<StateOp>>> calls() const {
    const SlotIndex a = scratch_slot(0), b = scratch_slot(1);
    const auto full = MaskKind::full, causal = MaskKind::causal;
    const auto fresh = StateOpKind::block, more = StateOpKind::accumulate;
    return {{{block(fresh, 0, 0, full, 0), block(fresh, a, 2, causal, -10), merge(1, a, 0)},
             {block(fresh, 2, 1, causal, 60), block(more, 2, 0, causal, 95)}},
            {{block(fresh, a, 1, causal, 100), block(fresh, b, 0, causal, 1), merge(a, b, a),
              merge(0, 1, a)}},
            {{block(more, 0, 2, full, 0), finalize(0)},
             {block(fresh, a, 0, causal, -50), merge(b, a, 2), finalize(b)}}};
  }

  Attended run(const KernelTable& table, std::vector<float>& states) {
    const AttentionCase problem =
        make_problem({90, 270, kHeads, 1, kDim, kValueDim}, MaskKind::full, 50);
    const KernelProblem kernel_problem{problem.shape, DType::f32, kRows[0], blocks_of(table, 3)};
    KernelRunner runner(table, kernel_problem, problem.k.view(), problem.v.view(), kKeys);
    Attended result = unset_result(problem);
    const std::vector<std::vector<int>> unread_slots{{1, 2}, {0}, {}};
    const std::vector<std::vector<std::vector<StateOp>>> all = calls();
    for (std::size_t call = 0; call < all.size(); ++call) {
      std::vector<QueryProgram> programs;
      for (std::size_t i = 0; i < all[call].size(); ++i)
        programs.push_back({i == 0 ? 0 : kRows[0], kRows[i], all[call][i]});
      runner.forward({.q = problem.q.view(),
                      .out = result.out.view(),
                      .lse = lse_view(result),
                      .programs = programs,
                      .num_scratch_slots = 2,
                      .num_carried_slots = 3});
      for (const int slot : unread_slots[call]) {
        std::byte* memory = runner.carried() + slot * table.carried_slot_bytes(kernel_problem);
        read_states(table, memory, kRows[slot / 2], states);
      }
    }
    return result;
  }

  /// m, l, o of the first rows of a slot, in one order for both layouts.
  static void read_states(const KernelTable& table, std::byte* memory, std::int64_t num_rows,
                          std::vector<float>& states) {
    const bool is_cpu = table.device == DeviceKind::cpu;
    const StateShape shape{kHeads, kRows[0], kValueDim};
    const StateSlot at = state_slot_at(shape, memory);
    const std::int64_t floats = cpu::state_floats(kValueDim), tiles = cpu::tiles_of(kRows[0]);
    for (std::int64_t head = 0; head < kHeads; ++head)
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t state = head * kRows[0] + row;
        const float* tile = reinterpret_cast<float*>(memory) +
                            (head * tiles + row / kQueryTile) * floats + row % kQueryTile;
        states.push_back(is_cpu ? tile[0] : at.m[state]);
        states.push_back(is_cpu ? tile[kQueryTile] : at.l[state]);
        for (std::int64_t d = 0; d < kValueDim; ++d)
          states.push_back(is_cpu ? tile[(2 + d) * kQueryTile]
                                  : at.o[state * shape.padded_dim() + d]);
      }
  }
};

TEST_F(ForwardF32Programs, ResultsAndStatesHaveTheBitsOfTheCpu) {
  std::vector<float> cpu_states;
  const Attended expected = run(cpu_table(), cpu_states);
  in_all_modes([&] {
    std::vector<float> states;
    expect_same(run(sm80_kernels(), states), expected);
    EXPECT_TRUE(bits_equal(states, cpu_states));
  });
}

TEST_F(ForwardF32, HeadMaximaAreThoseOfTheCpu) {
  AttentionCase problem = make_problem({80, 140, 3, 1, 16, 8}, MaskKind::full, 60);
  const SlotIndex slot = scratch_slot(0);
  const std::vector<StateOp> ops{
      {.kind = StateOpKind::block, .dst = slot, .kv_block = 0, .mask = {MaskKind::causal, -5}},
      {.kind = StateOpKind::finalize, .left = slot}};
  const QueryProgram program{0, 80, ops};
  const std::int64_t keys[] = {140};
  const auto record = [&](const KernelTable& table, std::vector<float> maxima) {
    const KernelProblem kernel_problem{problem.shape, DType::f32, 80, blocks_of(table, 2)};
    KernelRunner runner(table, kernel_problem, problem.k.view(), problem.v.view(), keys);
    Attended result = unset_result(problem);
    runner.forward({.q = problem.q.view(),
                    .out = result.out.view(),
                    .lse = lse_view(result),
                    .programs = {&program, 1},
                    .head_maxima = maxima.data()});
    return maxima;
  };
  const std::vector<float> start{-kInf, 1e6f, -kInf};
  const std::vector<float> expected = record(cpu_table(), start);
  EXPECT_GT(expected[0], 0.0f);
  EXPECT_EQ(expected[1], 1e6f);
  in_all_modes([&] {
    EXPECT_TRUE(bits_equal(record(sm80_kernels(), start), expected));
    EXPECT_TRUE(bits_equal(record(sm80_kernels(), expected), expected));
  });

  problem.q.set(50, 0, 3, kNan);
  problem.q.set(3, 2, 3, kNan);  // a row that sees nothing
  const std::vector<float> poisoned = record(sm80_kernels(), start);
  EXPECT_TRUE(std::isnan(poisoned[0]));
  EXPECT_EQ(poisoned[2], expected[2]);
}

}  // namespace
}  // namespace cpattn::cuda
