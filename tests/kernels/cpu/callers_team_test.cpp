// A trainer may call from an OpenMP parallel region of its own. The kernels' threads are never the
// members of that team: every member's call is a whole one, in memory of its own.
#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <string>

#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {
namespace {

constexpr int kMembers = 2;

/// What each member of a team gets from `call`.
template <class Call>
auto by_member(const Call& call) {
  std::array<decltype(call()), kMembers> results;
#pragma omp parallel num_threads(kMembers)
  results[static_cast<std::size_t>(omp_get_thread_num())] = call();
  return results;
}

/// Types that are widened by the team before they are computed on, and one that is not.
template <class Visitor>
void for_each_way(Visitor&& visit) {
  for (const KernelTable* table : available_kernels())
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (const int threads : {1, 2}) {
        SCOPED_TRACE(std::string(table->name) + " " + std::string(name_of(dtype)) + ", threads " +
                     std::to_string(threads));
        visit(*table, dtype, threads);
      }
}

TEST(CallersTeam, Forward) {
  for_each_way([](const KernelTable& table, DType dtype, int threads) {
    const AttentionCase problem =
        make_random_case(make_shape(4, 2, 19, 13), batch_of_one(100, 100),
                         test_config(MaskKind::causal, 1 << 20), dtype, 11);
    const Attended expected = run_one_block(table, problem);
    for (const Attended& result :
         by_member([&] { return run_one_block(table, problem, {.num_threads = threads}); })) {
      EXPECT_TRUE(bits_equal(result.out, expected.out));
      EXPECT_TRUE(bits_equal(result.lse, expected.lse));
    }
  });
}

TEST(CallersTeam, Backward) {
  for_each_way([](const KernelTable& table, DType dtype, int threads) {
    const GradientInputs in = random_gradient_inputs(make_shape(4, 2, 19, 13), 100, 100,
                                                     {MaskKind::causal, 1}, dtype, 12);
    const auto call = [&](int num_threads) {
      return run_gradient(table, in,
                          {.row_chunk = 30, .key_chunk = 40, .num_threads = num_threads});
    };
    const Gradients expected = call(1);
    for (const Gradients& result : by_member([&] { return call(threads); })) {
      EXPECT_TRUE(bits_equal(result.dq, expected.dq));
      EXPECT_TRUE(bits_equal(result.dk, expected.dk));
      EXPECT_TRUE(bits_equal(result.dv, expected.dv));
    }
  });
}

}  // namespace
}  // namespace cpattn::testing
