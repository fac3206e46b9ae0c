// Faults planted in Hopper's backward, one at a time, and which way of executing it must notice.
#include <optional>
#include <string>

#include "kernels/cuda/backward_dkv_sm90.cuh"
#include "kernels/cuda/backward_dq_sm90.cuh"
#include "kernels/cuda/backward_sm90.h"
#include "tests/kernels/cuda/backward_test.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::Options;
using cuda_host::ThreadOrder;
using sm90_gradient::Fault;
using testing::GradientInputs;
using testing::GradientRunner;
using testing::Gradients;
using testing::kNan;

constexpr Options kEarly{}, kLate{.landing = Landing::late};

/// Both kernels, one block each: two heads of two items, three tiles of rows and of keys, so that
/// stages and own tiles are filled anew.
class BackwardSm90Faults : public BackwardTest {
 protected:
  static constexpr std::int64_t kRows = 150, kKeys = 170;

  template <Fault kFault>
  Gradients run(const Options& options) {
    using C = sm90_gradient::Config<bf16, 1, kFault>;
    executor_.set_options({});
    GradientRunner runner(sm90_kernels(), in_, {.row_chunk = 140});
    BackwardArgs args = runner.args();
    poison_slots(args);
    const Buffer image = testing::image_of(sm90_gradient::step_image, args);
    args.image = image.data();
    const BackwardParams params = backward_params(args);
    constexpr std::uint32_t kBytes = sm90_gradient::SharedPlan<C>::kBytes;
    executor_.set_options(options);
    launch(sm90_gradient::dkv_kernel<C>, dim3(1), dim3(sm90_gradient::kThreads), kBytes, &executor_,
           params);
    launch(sm90_gradient::dq_kernel<C>, dim3(1), dim3(sm90_gradient::kThreads), kBytes, &executor_,
           params);
    executor_.set_options({});
    sm90_kernels().gradient.sum_dkv(runner.sum_args());
    return runner.result();
  }

  /// The message with which the run stops, "numbers" where its bits are not those of the kernels
  /// without a fault, or nothing.
  template <Fault kFault>
  std::string caught(const Options& options) {
    if (!expected_) expected_ = run<Fault::none>({});
    try {
      return is_equal(run<kFault>(options), *expected_) ? "" : "numbers";
    } catch (const Error& error) {
      executor_.set_options({});
      return error.what();
    }
  }

  template <Fault kFault>
  bool is_accurate() {
    return BackwardTest::is_accurate(sm90_kernels(), in_, run<kFault>({}));
  }

  GradientInputs in_ = causal_inputs(testing::make_shape(2, 1, 16, 16), kRows, kKeys, DType::bf16);
  std::optional<Gradients> expected_;  ///< for these
};

TEST_F(BackwardSm90Faults, TheKernelsThemselvesAreRight) {
  in_all_modes([&] { EXPECT_EQ(caught<Fault::none>(executor_.options()), ""); });
  EXPECT_TRUE(is_accurate<Fault::none>());
}

TEST_F(BackwardSm90Faults, AWrongByteCountWaitsForEver) {
  for (const Options& options : {kEarly, kLate}) {
    EXPECT_PRED2(contains, caught<Fault::wrong_byte_count>(options), "wait at mbarrier");
  }
}

TEST_F(BackwardSm90Faults, TilesThatAreNotThereYet) {
  const int races = races_of([&] { EXPECT_NE(caught<Fault::no_wait_for_full>(kLate), ""); });
  EXPECT_EQ(races > 0, kFindsRaces);
  // Own tiles are asked for before the first tile that is waited for, so this is no race to the
  // thread sanitizer; but copies may overtake each other.
  EXPECT_NE(caught<Fault::no_wait_for_own>(kLate), "");
}

TEST_F(BackwardSm90Faults, TilesThatAreNotFreeYet) {
  races_of([&] {
    for (const Options& options : kModes) {
      SCOPED_TRACE(describe(options));
      EXPECT_NE(caught<Fault::no_wait_for_empty>(options), "");
      EXPECT_NE(caught<Fault::own_replaced_early>(options), "");
    }
  });
}

TEST_F(BackwardSm90Faults, AMissingFenceBeforeProductsIsReported) {
  for (const Options& options : {kEarly, kLate}) {
    EXPECT_PRED2(contains, caught<Fault::no_fence_before_products>(options), "no fence");
  }
}

TEST_F(BackwardSm90Faults, WrongNumbers) {
  EXPECT_EQ(caught<Fault::wrong_stride>(kEarly), "numbers");
  EXPECT_FALSE(is_accurate<Fault::wrong_stride>());
  EXPECT_FALSE(is_accurate<Fault::sums_not_reset>());
  EXPECT_FALSE(is_accurate<Fault::delta_ignored>());
}

TEST_F(BackwardSm90Faults, ANanThatIsMultipliedByAWeightOfZeroShowsInTheNumbers) {
  EXPECT_EQ(caught<Fault::hidden_specials_multiplied>(kEarly), "");
  in_.k.set(kKeys - 1, 0, 5, kNan);
  expected_.reset();
  EXPECT_EQ(caught<Fault::hidden_specials_multiplied>(kEarly), "numbers");
}

/// By luck the other lanes have read lse and delta when lane 0 says that they have.
TEST_F(BackwardSm90Faults, ALaneThatSpeaksForOthersTooEarlyIsARace) {
  const int races = races_of([&] { EXPECT_EQ(caught<Fault::no_sync_before_release>(kEarly), ""); });
  EXPECT_EQ(races > 0, kFindsRaces);
}

/// The other consumer may still multiply, or look, when the first one puts zeros.
TEST_F(BackwardSm90Faults, ZerosWithoutABarrierAreARace) {
  in_.k.set(kKeys - 1, 0, 5, kNan);
  const int races = races_of([&] {
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      caught<Fault::no_barrier_before_zeros>({.order = ThreadOrder::random, .seed = seed});
    }
  });
  EXPECT_EQ(races > 0, kFindsRaces);
  EXPECT_EQ(caught<Fault::none>(kEarly), "");
}

}  // namespace
}  // namespace cpattn::cuda
