#include "kernels/cuda/burn.h"

#include <vector>

#include "kernels/cuda/burn.cuh"
#include "kernels/cuda/burn_sm90.cuh"
#include "kernels/cuda/kernel_table.h"
#include "src/base/dtype.h"
#include "tests/kernels/cuda/host_test.h"

namespace cpattn::cuda {
namespace {

class Burn : public HostTest {
 protected:
  template <class Kernel>
  std::vector<float> results(Kernel kernel, std::size_t shared_bytes, std::int64_t rounds) {
    std::vector<float> result(kBurnThreads);
    run(kernel, dim3(1), dim3(kBurnThreads), shared_bytes, rounds, result.data());
    return result;
  }

  /// Every round adds the same products to every sum. Operands are at most 1, so a sum of `depth`
  /// products and two rounds is at most 2 depth, as is each of its 2 depth roundings over epsilon;
  /// adding up a thread's sums rounds as often as there are of them, at no more than their total.
  template <class Kernel>
  void expect_twice_as_much(Kernel kernel, std::size_t shared_bytes, int num_sums, int depth) {
    in_all_modes([&] {
      const std::vector<float> once = results(kernel, shared_bytes, 1);
      const std::vector<float> twice = results(kernel, shared_bytes, 2);
      const double bound = epsilon(DType::f32) * num_sums * 2 * depth * (2 * depth + num_sums);
      for (std::size_t i = 0; i < once.size(); ++i) {
        EXPECT_NE(once[i], 0.0f);
        EXPECT_NEAR(twice[i], 2.0 * once[i], bound);
      }
    });
  }
};

TEST_F(Burn, ProductsAreReallyDone) {
  const auto on_tensor_cores = [&](auto type) {
    expect_twice_as_much(burn_products_kernel<decltype(type)>, 0, 4 * kBurnChains, 16);
    expect_twice_as_much(sm90::burn_products_kernel<decltype(type)>, sm90::kBurnSharedBytes,
                         sm90::kBurnN / 2, sm90::kBurnDepth);
  };
  on_tensor_cores(bf16{});
  on_tensor_cores(f16{});
}

TEST_F(Burn, FlopsAreThoseOfTheRoundsAndWorkers) {
  for (const KernelTable* table : {&sm80_kernels(), &sm90_kernels()}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      in_all_modes([&] {
        const Stream stream{&executor_};
        const double flop = table->burn({dtype, 1, 1, stream});
        EXPECT_GT(flop, 0.0);
        EXPECT_EQ(table->burn({dtype, 2, 1, stream}), 2 * flop);
        EXPECT_EQ(table->burn({dtype, 1, 3, stream}), 3 * flop);
      });
    }
  }
}

}  // namespace
}  // namespace cpattn::cuda
