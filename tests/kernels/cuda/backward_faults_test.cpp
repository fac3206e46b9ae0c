// Faults planted in the portable backward, one at a time, and which way of executing it must
// notice.
#include <algorithm>
#include <vector>

#include "kernels/cuda/backward_dkv_sm80.cuh"
#include "kernels/cuda/backward_dq_sm80.cuh"
#include "kernels/cuda/backward_sm80.h"
#include "tests/kernels/cuda/backward_test.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::Options;
using cuda_host::ThreadOrder;
using sm80_gradient::Fault;
using testing::GradientInputs;
using testing::GradientRunner;
using testing::Gradients;

constexpr Options kEarly{}, kLate{.landing = Landing::late};

class BackwardFaults : public BackwardTest {
 protected:
  static constexpr std::int64_t kRows = 100, kKeys = 110;  // four slices

  template <Fault kFault>
  Gradients run() {
    using C = sm80_gradient::Config<bf16, 2, kFault>;
    GradientRunner runner(sm80_kernels(), in_, {.row_chunk = 60});
    BackwardArgs args = runner.args();
    const Buffer image = testing::image_of(sm80_kernels().gradient.step_image, args);
    args.image = image.data();
    const BackwardParams params = backward_params(args);
    const std::uint32_t bytes = sm80_gradient::shared_bytes<C>(params);
    executor_.set_options(options_);
    launch(sm80_gradient::dkv_kernel<C, sm80_gradient::DkvPart::both>, dim3(1), dim3(C::kThreads),
           bytes, &executor_, params);
    launch(sm80_gradient::dq_kernel<C>, dim3(1), dim3(C::kThreads), bytes, &executor_, params);
    executor_.set_options({});
    sm80_kernels().gradient.sum_dkv(runner.sum_args());
    return runner.result();
  }

  /// Whether the run stops with a message or gives other bits than the kernel without a fault, run
  /// in ascending order.
  template <Fault kFault>
  bool is_caught(const Options& options) {
    options_ = {};
    const Gradients expected = run<Fault::none>();
    options_ = options;
    try {
      return !is_equal(run<kFault>(), expected);
    } catch (const Error&) {
      return true;
    }
  }

  template <Fault kFault>
  int num_caught_random(Landing landing) {
    int caught = 0;
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      caught += is_caught<kFault>({.order = ThreadOrder::random, .seed = seed, .landing = landing});
    }
    return caught;
  }

  /// By the bounds that the accuracy tests ask for.
  template <Fault kFault>
  bool is_accurate() {
    options_ = {};
    return BackwardTest::is_accurate(sm80_kernels(), in_, run<kFault>());
  }

  GradientInputs in_ = testing::random_gradient_inputs(
      testing::make_shape(1, 1, 16, 16), kRows, kKeys, {MaskKind::causal, 11}, DType::bf16, 1);
  Options options_;
};

TEST_F(BackwardFaults, TheKernelsThemselvesAreRight) {
  EXPECT_FALSE(is_caught<Fault::none>(kLate));
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::early), 0);
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::late), 0);
  EXPECT_TRUE(is_accurate<Fault::none>());
}

TEST_F(BackwardFaults, MissingBarriers) {
  int races = races_of([&] {
    EXPECT_TRUE(is_caught<Fault::no_barrier_after_wait>(kEarly));
    EXPECT_EQ(num_caught_random<Fault::no_barrier_after_wait>(Landing::early), 2);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
  races = races_of([&] {
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_refill>(Landing::early), 2);
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_refill>(Landing::late), 2);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(BackwardFaults, AMissingWaitShowsOnlyWhenCopiesLandLate) {
  races_of([&] {  // the thread sanitizer sees it either way
    EXPECT_FALSE(is_caught<Fault::no_wait>(kEarly));
    EXPECT_TRUE(is_caught<Fault::no_wait>(kLate));
  });
}

TEST_F(BackwardFaults, WrongSumsAreOutOfBounds) {
  EXPECT_FALSE(is_accurate<Fault::sums_not_reset>());
  EXPECT_FALSE(is_accurate<Fault::delta_ignored>());
}

TEST_F(BackwardFaults, ANanThatIsMultipliedByAWeightOfZeroShowsInTheNumbers) {
  EXPECT_FALSE(is_caught<Fault::hidden_specials_multiplied>(kEarly));
  in_.k.set(kKeys - 1, 0, 5, testing::kNan);
  EXPECT_TRUE(is_caught<Fault::hidden_specials_multiplied>(kEarly));
}

}  // namespace
}  // namespace cpattn::cuda
