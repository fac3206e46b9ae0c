// What only Hopper's forward has to show: it is right however threads are ordered and copies and
// products land, and every wait and barrier of its pipeline is needed, as planted faults show. Its
// results are judged by the tests of all backends.
#include "kernels/cuda/forward_sm90.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/forward_sm90.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/pack_kv.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/error_bound.h"
#include "tests/support/run_kernels.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::Options;
using cuda_host::ThreadOrder;
using sm90::Fault;
using testing::Attended;
using testing::AttentionCase;
using testing::bits_equal;
using testing::HostTensor;
using testing::kNan;

constexpr std::int64_t kOneChunk = 1 << 20;

class ForwardSm90 : public HostTest {
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
  static Attended run(const AttentionCase& problem, int num_blocks) {
    return testing::run_one_block(sm90_kernels(), problem, {.num_threads = num_blocks});
  }

  void expect_right_in_all_modes(const AttentionCase& problem) {
    const Attended first = run(problem, 1);
    const testing::Oracle oracle(problem);
    EXPECT_TRUE(oracle.accepts(
        first, testing::error_model(sm90_kernels(), problem.dtype, problem.out_dtype)));
    in_all_modes([&] {
      const Attended result = run(problem, 1);
      EXPECT_TRUE(bits_equal(result.out, first.out));
      EXPECT_TRUE(bits_equal(result.lse, first.lse));
    });
  }
};

TEST_F(ForwardSm90, StepsOfTwoTilesInAllModes) {
  // Two heads by one block: the ring goes on from one to the next. Two row tiles, the second of two
  // rows; three steps of keys, the last of one tile.
  expect_right_in_all_modes(causal_case(testing::make_shape(2, 1, 40, 24), 130, 300, DType::bf16));
}

TEST_F(ForwardSm90, StepsOfTwoTilesAndPanelsInAllModes) {
  // One panel of keys and two of values: the second panel of keys is zero.
  expect_right_in_all_modes(causal_case(testing::make_shape(1, 1, 64, 72), 66, 140, DType::f16));
}

TEST_F(ForwardSm90, StepsOfOneTileInAllModes) {
  expect_right_in_all_modes(causal_case(testing::make_shape(1, 1, 192, 128), 65, 70, DType::bf16));
  expect_right_in_all_modes(causal_case(testing::make_shape(1, 1, 130, 250), 3, 130, DType::f16));
}

TEST_F(ForwardSm90, BlocksAreAsManyAsWorkAtATime) {
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

/// Values that are not finite: rows that see them become NaN in that channel, others do not change.
TEST_F(ForwardSm90, HiddenValuesAreTakenOut) {
  // Row i of 100 sees 201 + i keys: key 256, in the third step, is hidden from some of both groups.
  const AttentionCase clean = causal_case(testing::make_shape(1, 1, 16, 70), 100, 300, DType::f16);
  const Attended expected = run(clean, 1);
  AttentionCase poisoned = clean;
  poisoned.v.set(256, 0, 5, testing::kInf);
  poisoned.v.set(270, 0, 5, kNan);
  poisoned.v.set(290, 0, 69, kNan);
  in_all_modes([&] {
    const Attended result = run(poisoned, 1);
    for (std::int64_t row = 0; row < 100; ++row)
      for (std::int64_t d = 0; d < 70; ++d) {
        const bool sees_special = (d == 5 && row >= 56) || (d == 69 && row >= 90);
        if (sees_special) {
          EXPECT_TRUE(std::isnan(result.out.at(row, 0, d))) << row << ", " << d;
        } else {
          ASSERT_EQ(result.out.bits_at(row, 0, d), expected.out.bits_at(row, 0, d))
              << row << ", " << d;
        }
      }
    EXPECT_TRUE(bits_equal(result.lse, expected.lse));
  });
}

/// Rows of the same tile that see keys beyond the step keep the channels that have none of these.
TEST_F(ForwardSm90, ValuesTakenOutTouchNoOtherChannel) {
  // Row i of 128 sees 273 + i keys: in the third step, keys 256 to 383, the last rows see all.
  const AttentionCase clean = causal_case(testing::make_shape(1, 1, 16, 24), 128, 400, DType::bf16);
  const Attended expected = run(clean, 1);
  AttentionCase poisoned = clean;
  poisoned.v.set(300, 0, 5, kNan);
  const Attended result = run(poisoned, 1);
  for (std::int64_t row = 0; row < 128; ++row)
    for (std::int64_t d = 0; d < 24; ++d) {
      if (d == 5 && row >= 28) {
        EXPECT_TRUE(std::isnan(result.out.at(row, 0, d))) << row;
      } else {
        ASSERT_EQ(result.out.bits_at(row, 0, d), expected.out.bits_at(row, 0, d))
            << row << ' ' << d;
      }
    }
}

/// One head of 70 rows over 400 keys in four steps, by a kernel with a fault.
class ForwardSm90Faults : public HostTest {
 protected:
  static constexpr std::int64_t kRows = 70, kKeys = 400, kDim = 16;

  ForwardSm90Faults()
      : q_(DType::bf16, {kRows, 1, kDim}),
        k_(DType::bf16, {kKeys, 1, kDim}),
        v_(DType::bf16, {kKeys, 1, kDim}) {
    q_.fill_normal(1);
    k_.fill_normal(2);
    v_.fill_normal(3);
  }

  /// The message with which the run stops, "numbers" where its bits are not those of the kernel
  /// without a fault, or nothing.
  template <Fault kFault>
  std::string caught(Options options) {
    if (!expected_) {
      executor_.set_options({});
      expected_ = run<Fault::none>();
    }
    executor_.set_options(options);
    try {
      return bits_equal(run<kFault>(), *expected_) ? "" : "numbers";
    } catch (const Error& error) {
      return error.what();
    }
  }
  HostTensor q_, k_, v_;
  std::int64_t rows_ = kRows;           ///< of q_, its first ones
  std::int64_t first_limit_ = 325;      ///< row i sees so many keys + i
  std::optional<HostTensor> expected_;  ///< for these

 private:
  template <Fault kFault>
  HostTensor run() {
    using C = sm90::Config<bf16, 1, 1, 2, kFault>;
    const Stream stream{static_cast<cudaStream_t>(&executor_)};
    const KernelProblem problem{
        .shape = {1, 1, kDim, kDim, 0.25}, .dtype = DType::bf16, .max_chunk_rows = rows_};
    const std::int64_t num_keys = k_.shape()[0];
    const PackChunk chunk{0, num_keys, 0};
    const Buffer packed(packed_kv_bytes(problem, num_keys));
    const HostTensor &q = q_, &k = k_, &v = v_;
    pack_kv({.problem = problem,
             .k = k.view(),
             .v = v.view(),
             .chunks = {&chunk, 1},
             .packed = packed.data(),
             .stream = stream});
    const StateOp ops[] = {{.kind = StateOpKind::block,
                            .dst = -1,
                            .kv_block = 0,
                            .mask = {MaskKind::causal, first_limit_}},
                           {.kind = StateOpKind::finalize, .left = -1, .mask = {}}};
    const QueryProgram program{0, rows_, ops};
    const KvBlock block{packed.data(), num_keys};
    HostTensor out(DType::bf16, {kRows, 1, kDim});
    std::vector<float> lse(kRows);
    ForwardArgs args{.problem = problem,
                     .q = q.view(),
                     .out = out.view(),
                     .lse = {lse.data(), {kRows, 1}, {1, 1}},
                     .kv_blocks = {&block, 1},
                     .programs = {&program, 1},
                     .limits = {num_keys, 1, 0},
                     .progress = {},
                     .stream = stream};
    const std::vector<std::byte> bytes = make_step_image(args, sm90::kRowTile);
    const Buffer image(bytes.size());
    std::copy(bytes.begin(), bytes.end(), image.data());
    args.image = image.data();
    launch(sm90::forward_kernel<C>, dim3(1), dim3(sm90::kThreads), sm90::SharedPlan<C>::kBytes,
           &executor_, forward_params(args, sm90::kRowTile));
    return out;
  }
};

constexpr Options kEarly{}, kLate{.landing = Landing::late};

TEST_F(ForwardSm90Faults, TheKernelItselfIsRight) {
  in_all_modes([&] { EXPECT_EQ(caught<Fault::none>(executor_.options()), ""); });
}

TEST_F(ForwardSm90Faults, AWrongByteCountWaitsForEver) {
  in_all_modes([&] {
    EXPECT_PRED2(contains, caught<Fault::wrong_byte_count>(executor_.options()),
                 "wait at mbarrier");
  });
}

TEST_F(ForwardSm90Faults, KeysThatAreNotThereYet) {
  int races = races_of([&] { EXPECT_NE(caught<Fault::no_wait_for_full>(kLate), ""); });
  EXPECT_EQ(races > 0, kFindsRaces);
  // Copies that land at once are there by luck.
  races = races_of([&] { caught<Fault::no_wait_for_full>(kEarly); });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(ForwardSm90Faults, StagesThatAreNotFreeYet) {
  races_of([&] {
    in_all_modes([&] { EXPECT_NE(caught<Fault::no_wait_for_empty>(executor_.options()), ""); });
  });
}

// A lane that is slow finds the barrier two phases on, where another one has released for it.
TEST_F(ForwardSm90Faults, ASlowLaneIsLeftBehindWhereLanesDoNotGather) {
  rows_ = 60;  // none for the second consumer, which passes all ten steps by
  first_limit_ = 1200;
  for (HostTensor* keys : {&k_, &v_}) {
    *keys = HostTensor(DType::bf16, {first_limit_, 1, kDim});
    keys->fill_normal(4);
  }
  constexpr int kLast = sm90::kThreads - 1;
  for (const int slow : {0, sm90::kGroupThreads + 37, 2 * sm90::kGroupThreads, kLast}) {
    EXPECT_EQ(caught<Fault::none>({.slow_thread = slow}), "") << slow;
  }
  EXPECT_PRED2(contains, caught<Fault::no_gathering>({.slow_thread = kLast}), "deadlock");
}

TEST_F(ForwardSm90Faults, AWrongStrideShowsInTheNumbers) {
  in_all_modes([&] { EXPECT_EQ(caught<Fault::wrong_stride>(executor_.options()), "numbers"); });
}

TEST_F(ForwardSm90Faults, QueriesWithoutABarrierAreARace) {
  // A product is a rendezvous here: only the thread sanitizer sees that nothing ordered the writes.
  const int races =
      races_of([&] { EXPECT_EQ(caught<Fault::no_barrier_after_queries>(kEarly), ""); });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(ForwardSm90Faults, ANanThatIsMultipliedByAWeightOfZeroShowsInTheNumbers) {
  EXPECT_EQ(caught<Fault::hidden_values_as_numbers>(kEarly), "");
  v_.set(335, 0, 5, kNan);
  expected_.reset();
  EXPECT_EQ(caught<Fault::hidden_values_as_numbers>(kEarly), "numbers");
}

}  // namespace
}  // namespace cpattn::cuda
