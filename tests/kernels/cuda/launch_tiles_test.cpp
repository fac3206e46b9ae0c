// Tiles are said to be what launches take them to be: rows decide how many thread blocks there are,
// and a device with less shared memory than is said refuses.
#include "kernels/launch_tiles.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tests/kernels/cuda/backward_test.h"
#include "tests/support/run_kernels.h"

namespace cpattn::cuda {
namespace {

using testing::AttentionCase;
using testing::GradientInputs;
using testing::GradientRunner;

constexpr int kMoreBlocksThanWork = 100;

class LaunchTilesTest : public BackwardTest {
 protected:
  /// Calls check(table, dtype, shape) for a case of every configuration.
  template <class Check>
  static void for_each_configuration(const Check& check) {
    for (const KernelTable* table : {&sm80_kernels(), &sm90_kernels()}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const auto& [dim, value_dim] :
             {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {40, 200}}) {
          SCOPED_TRACE(detail::concat(table->name, " ", name_of(dtype), " ", dim, " ", value_dim));
          check(*table, dtype, testing::make_shape(1, 1, dim, value_dim));
        }
      }
    }
  }

  /// `launch` with `shared_bytes` of shared memory on the device: whether it is taken.
  template <class Launch>
  bool is_taken(std::size_t shared_bytes, const Launch& launch) {
    executor_.set_options({.max_shared_bytes = shared_bytes, .only_checks = true});
    try {
      launch();
    } catch (const InvalidArgument&) {
      return false;
    }
    return true;
  }
};

TEST_F(LaunchTilesTest, SharedMemoryOfForward) {
  for_each_configuration([&](const KernelTable& table, DType dtype, const AttentionShape& shape) {
    const AttentionCase problem = testing::make_random_case(
        shape, batch_of_one(3, 5), testing::test_config(MaskKind::causal, 64), dtype, 1);
    const KernelProblem facts{shape, dtype, 3, 1};
    const auto launch = [&] { testing::run_one_block(table, problem); };
    const std::size_t bytes = table.launch_tiles(facts).shared_bytes;

    EXPECT_TRUE(is_taken(bytes, launch));
    EXPECT_FALSE(is_taken(bytes - 1, launch));
  });
}

TEST_F(LaunchTilesTest, SharedMemoryOfBackward) {
  for_each_configuration([&](const KernelTable& table, DType dtype, const AttentionShape& shape) {
    executor_.set_options({});
    const GradientInputs in = causal_inputs(shape, 3, 5, dtype);
    GradientRunner runner(table, in);
    BackwardArgs args = runner.args();
    const Buffer image = testing::image_of(table.gradient.step_image, args);
    args.image = image.data();
    std::size_t most = 0;
    for (const LaunchTiles& tiles : table.gradient.launch_tiles(args.problem))
      most = std::max(most, tiles.shared_bytes);

    EXPECT_TRUE(is_taken(most, [&] { table.gradient.backward(args); }));
    EXPECT_FALSE(is_taken(most - 1, [&] { table.gradient.backward(args); }));
  });
}

TEST_F(LaunchTilesTest, RowsThatAThreadBlockOwns) {
  for (const KernelTable* table : {&sm80_kernels(), &sm90_kernels()}) {
    for (const DType dtype : {DType::f32, DType::f16}) {
      for (const int dim : {16, 200}) {
        SCOPED_TRACE(detail::concat(table->name, " ", name_of(dtype), " ", dim));
        const AttentionShape shape = testing::make_shape(1, 1, dim, dim);
        const std::vector<LaunchTiles> launches =
            table->gradient.launch_tiles({shape, dtype, 1, 1});
        // One row more than a tile of dq, and one key more than a tile of dk and dv.
        const int rows = launches.back().own_rows + 1, keys = launches.front().own_rows + 1;
        const GradientInputs in = causal_inputs(shape, rows, keys, dtype);
        GradientRunner runner(*table, in, {.num_threads = kMoreBlocksThanWork});
        BackwardArgs args = runner.args();
        const Buffer image = testing::image_of(table->gradient.step_image, args);
        args.image = image.data();
        executor_.reset_counters();
        table->gradient.backward(args);

        EXPECT_EQ(executor_.counters().blocks, 2 * launches.size());
      }
    }
  }
}

TEST_F(LaunchTilesTest, EveryResultIsNamedOnce) {
  for_each_configuration([](const KernelTable& table, DType dtype, const AttentionShape& shape) {
    const KernelProblem facts{shape, dtype, 1, 1};
    std::string names(table.launch_tiles(facts).result);
    for (const LaunchTiles& tiles : table.gradient.launch_tiles(facts))
      names += ", " + std::string(tiles.result);

    EXPECT_EQ(names, "out, dk, dv, dq");
  });
}

}  // namespace
}  // namespace cpattn::cuda
