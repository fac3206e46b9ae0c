// Faults planted in the portable forward, one at a time, and which way of executing it must notice.
#include <algorithm>
#include <vector>

#include "kernels/cuda/forward_sm80.cuh"
#include "kernels/cuda/forward_sm80.h"
#include "kernels/cuda/pack_kv.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/compare.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;
using cuda_host::Options;
using cuda_host::ThreadOrder;
using sm80::Fault;
using testing::HostTensor;
using testing::kNan;

constexpr Options kEarly{}, kLate{.landing = Landing::late};

class ForwardFaults : public HostTest {
 protected:
  static constexpr std::int64_t kRows = 20, kKeys = 300, kDim = 16;  // the ring goes round twice

  ForwardFaults()
      : q_(DType::bf16, {kRows, 1, kDim}),
        k_(DType::bf16, {kKeys, 1, kDim}),
        v_(DType::bf16, {kKeys, 1, kDim}) {
    q_.fill_normal(1);
    k_.fill_normal(2);
    v_.fill_normal(3);
  }

  /// Whether the run stops with a message or gives other bits than the kernel without a fault, run
  /// in ascending order.
  template <Fault kFault>
  bool is_caught(const Options& options) {
    executor_.set_options({});
    const HostTensor expected = run<Fault::none>();
    executor_.set_options(options);
    try {
      return !testing::bits_equal(run<kFault>(), expected);
    } catch (const Error&) {
      return true;
    }
  }

  template <Fault kFault>
  int num_caught_random(Landing landing) {
    int caught = 0;
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      caught += is_caught<kFault>({.order = ThreadOrder::random, .seed = seed, .landing = landing});
    }
    return caught;
  }

  HostTensor q_, k_, v_;

 private:
  template <Fault kFault>
  HostTensor run() {
    using C = sm80::Config<bf16, 1, kFault>;
    const Stream stream{static_cast<cudaStream_t>(&executor_)};
    const KernelProblem problem{
        .shape = {1, 1, kDim, kDim, 0.25}, .dtype = DType::bf16, .max_chunk_rows = kRows};
    const PackChunk chunk{0, kKeys, 0};
    const Buffer packed(packed_kv_bytes(problem, kKeys));
    const HostTensor &q = q_, &k = k_, &v = v_;
    pack_kv({.problem = problem,
             .k = k.view(),
             .v = v.view(),
             .chunks = {&chunk, 1},
             .packed = packed.data(),
             .stream = stream});
    // Row i sees the keys up to 250 + i.
    const StateOp ops[] = {
        {.kind = StateOpKind::block, .dst = -1, .kv_block = 0, .mask = {MaskKind::causal, 250}},
        {.kind = StateOpKind::finalize, .left = -1, .mask = {}}};
    const QueryProgram program{0, kRows, ops};
    const KvBlock block{packed.data(), kKeys};
    HostTensor out(DType::bf16, {kRows, 1, kDim});
    std::vector<float> lse(kRows);
    ForwardArgs args{.problem = problem,
                     .q = q.view(),
                     .out = out.view(),
                     .lse = {lse.data(), {kRows, 1}, {1, 1}},
                     .kv_blocks = {&block, 1},
                     .programs = {&program, 1},
                     .limits = {kKeys, 1, 0},
                     .progress = {},
                     .stream = stream};
    const std::vector<std::byte> bytes = make_step_image(args, C::kTileRows);
    const Buffer image(bytes.size());
    std::copy(bytes.begin(), bytes.end(), image.data());
    args.image = image.data();
    const ForwardParams params = forward_params(args, C::kTileRows);
    launch(sm80::forward_kernel<C>, dim3(1), dim3(sm80::kThreads),
           sm80::shared_bytes<C>(params.form), &executor_, params);
    return out;
  }
};

TEST_F(ForwardFaults, TheKernelItselfIsRight) {
  EXPECT_FALSE(is_caught<Fault::none>(kEarly));
  EXPECT_FALSE(is_caught<Fault::none>(kLate));
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::early), 0);
  EXPECT_EQ(num_caught_random<Fault::none>(Landing::late), 0);
}

TEST_F(ForwardFaults, MissingBarriers) {
  int races = races_of([&] {
    EXPECT_TRUE(is_caught<Fault::no_barrier_after_wait>(kEarly));
    EXPECT_EQ(num_caught_random<Fault::no_barrier_after_wait>(Landing::early), 3);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
  races = races_of([&] {
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_refill>(Landing::early), 3);
    EXPECT_EQ(num_caught_random<Fault::no_barrier_before_refill>(Landing::late), 3);
  });
  EXPECT_EQ(races > 0, kFindsRaces);
}

TEST_F(ForwardFaults, AWaitForTooFewShowsOnlyWhenCopiesLandLate) {
  EXPECT_FALSE(is_caught<Fault::wait_for_too_few>(kEarly));
  races_of([&] { EXPECT_TRUE(is_caught<Fault::wait_for_too_few>(kLate)); });
}

TEST_F(ForwardFaults, AWrongLimitShowsInTheNumbers) {
  EXPECT_TRUE(is_caught<Fault::limit_one_too_many>(kEarly));
}

TEST_F(ForwardFaults, ANanThatIsMultipliedByAWeightOfZeroShowsInTheNumbers) {
  EXPECT_FALSE(is_caught<Fault::hidden_values_as_numbers>(kEarly));
  v_.set(260, 0, 5, kNan);
  EXPECT_TRUE(is_caught<Fault::hidden_values_as_numbers>(kEarly));
}

}  // namespace
}  // namespace cpattn::cuda
