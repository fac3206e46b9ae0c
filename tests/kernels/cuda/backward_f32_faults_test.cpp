// Faults planted in the f32 backward, one at a time, and which way of executing it must notice.
#include <vector>

#include "kernels/cuda/backward_dkv_f32.cuh"
#include "kernels/cuda/backward_dq_f32.cuh"
#include "kernels/cuda/kernel_table.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Options;
using cuda_host::ThreadOrder;
using f32::Fault;
using testing::GradientInputs;
using testing::GradientRunner;
using testing::Gradients;

class BackwardF32Faults : public HostTest {
 protected:
  static constexpr std::int64_t kRows = 100, kKeys = 140;

  void SetUp() override {
    HostTest::SetUp();
    testing::tested().stream = {static_cast<cudaStream_t>(&executor_)};
  }
  void TearDown() override {
    testing::tested().stream = {};
    HostTest::TearDown();
  }

  template <Fault kFault>
  Gradients run(const Options& options) {
    using C = f32::GradientConfig<1, kFault>;
    GradientRunner runner(sm80_kernels(), in_, {.row_chunk = 60});
    BackwardArgs args = runner.args();
    const Buffer image = testing::image_of(sm80_kernels().gradient.step_image, args);
    args.image = image.data();
    const auto params = f32::f32_params(in_.shape, backward_params(args));
    executor_.set_options(options);
    launch(f32::dkv_kernel<C>, dim3(1), dim3(f32::kThreads), f32::kDkvSharedBytes<C>, &executor_,
           params);
    launch(f32::dq_kernel<C>, dim3(1), dim3(f32::kThreads), f32::kDqSharedBytes<C>, &executor_,
           params);
    executor_.set_options({});
    sm80_kernels().gradient.sum_dkv(runner.sum_args());
    return runner.result();
  }

  /// Whether the run stops with a message or gives other bits than the CPU's kernels.
  template <Fault kFault>
  bool is_caught(const Options& options = {}) {
    const KernelTable& cpu = *available_kernels().front();
    const Gradients expected = testing::run_gradient(cpu, in_, {.row_chunk = 60});
    try {
      const Gradients actual = run<kFault>(options);
      return !testing::bits_equal(actual.dq, expected.dq) ||
             !testing::bits_equal(actual.dk, expected.dk) ||
             !testing::bits_equal(actual.dv, expected.dv);
    } catch (const Error&) {
      return true;
    }
  }

  template <Fault kFault>
  int num_caught_random() {
    int caught = 0;
    for (std::uint64_t seed = 1; seed <= 2; ++seed)
      caught += is_caught<kFault>({.order = ThreadOrder::random, .seed = seed});
    return caught;
  }

  GradientInputs in_ = testing::random_gradient_inputs(
      testing::make_shape(1, 1, 16, 16), kRows, kKeys, {MaskKind::causal, 41}, DType::f32, 1);
};

TEST_F(BackwardF32Faults, TheKernelsThemselvesAreRight) {
  EXPECT_FALSE(is_caught<Fault::none>());
  EXPECT_EQ(num_caught_random<Fault::none>(), 0);
}

TEST_F(BackwardF32Faults, MissingBarriers) {
  int races = races_of([&] {
    EXPECT_TRUE(is_caught<Fault::no_barrier_after_stage>());
    EXPECT_EQ(num_caught_random<Fault::no_barrier_after_stage>(), 2);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
  races = races_of([&] { EXPECT_EQ(num_caught_random<Fault::no_barrier_before_stage>(), 2); });
  EXPECT_EQ(races > 0, kFindsRaces);
}

/// The sums are as accurate; their order is not the CPU's.
TEST_F(BackwardF32Faults, RowsCutElsewhereHaveOtherBits) {
  EXPECT_TRUE(is_caught<Fault::tiles_from_first_row>());
}

TEST_F(BackwardF32Faults, SumsThatAreNotResetAreWrong) {
  EXPECT_TRUE(is_caught<Fault::sums_not_reset>());
}

TEST_F(BackwardF32Faults, ANanThatIsMultipliedByAWeightOfZeroShowsInTheNumbers) {
  EXPECT_FALSE(is_caught<Fault::hidden_specials_multiplied>());
  in_.k.set(kKeys - 1, 0, 5, testing::kNan);  // seen by the last row alone
  const auto nans_of_row = [](const Gradients& result, std::int64_t row) {
    int count = 0;
    for (std::int64_t d = 0; d < 16; ++d) count += std::isnan(result.dq.at(row, 0, d)) ? 1 : 0;
    return count;
  };
  EXPECT_EQ(nans_of_row(run<Fault::none>({}), kRows - 2), 0);
  EXPECT_EQ(nans_of_row(run<Fault::none>({}), kRows - 1), 16);
  EXPECT_GT(nans_of_row(run<Fault::hidden_specials_multiplied>({}), kRows - 2), 0);
}

}  // namespace
}  // namespace cpattn::cuda
