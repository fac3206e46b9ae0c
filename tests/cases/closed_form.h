// Public reports as tests: the same closed form for every CP size, sharding and input type.
//
// Most of them use the U-recipe: K = 0, so every visible logit is 0, out is the mean of the visible
// values and lse is ln(number of visible keys). All weights are then exactly 1 and the values are
// small integers, so every sum is exact: out rounds once in the division (relative 2^-24) and once
// to its type, lse once.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

#include "src/base/error.h"
#include "tests/support/attend.h"
#include "tests/support/batches.h"
#include "tests/support/compare.h"

namespace cpattn::testing {

/// q random, K = 0, scale 1 and V[j] = place of key j in its document, in documents' rows; NaN in
/// all padding.
inline AttentionCase u_recipe(const SequenceBatch& batch, MaskKind mask, DType dtype,
                              std::int64_t heads = 1, std::int64_t kv_heads = 1) {
  AttentionCase problem =
      make_random_case({heads, kv_heads, 8, 8, 1.0}, batch, test_config(mask, 1), dtype, 1);
  for (const Document& document : batch.documents)
    for (std::int64_t j = 0; j < document.kv_tokens; ++j)
      for (std::int64_t h = 0; h < kv_heads; ++h)
        for (std::int64_t d = 0; d < 8; ++d) {
          problem.k.set(document.kv_begin + j, h, d, 0.0f);
          problem.v.set(document.kv_begin + j, h, d, static_cast<float>(j));
        }
  return problem;
}

/// Right answer of one (row, head).
struct RowAnswer {
  double out = 0.0;
  double lse = -INFINITY;
};
using Answer = std::function<RowAnswer(std::int64_t row, std::int64_t head)>;

/// What a result may be off; the defaults are those of the U-recipe.
struct Slack {
  double out = 0.0;               ///< absolute, before the rounding to the output type
  double lse = 0.0;               ///< absolute
  double relative = 2 * 0x1p-24;  ///< of both
};

inline void expect_answer(const AttentionCase& problem, const Attended& result,
                          const Answer& answer, const Slack& slack = {}) {
  const double rounding = problem.out_dtype == DType::f32 ? 0.0 : epsilon(problem.out_dtype) / 2;
  const auto& shape = result.out.shape();
  for (std::int64_t row = 0; row < shape[0]; ++row)
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      const RowAnswer want = answer(row, h);
      const float lse = result.lse[static_cast<std::size_t>(row * shape[1] + h)];
      if (std::isinf(want.lse)) {
        EXPECT_EQ(lse, -kInf) << "row " << row << " head " << h;
      } else {
        EXPECT_NEAR(lse, want.lse, slack.lse + slack.relative * std::abs(want.lse))
            << "row " << row << " head " << h;
      }
      for (std::int64_t d = 0; d < shape[2]; ++d) {
        const double bound = slack.out + (slack.relative + rounding) * std::abs(want.out);
        EXPECT_NEAR(result.out.at(row, h, d), want.out, bound)
            << "row " << row << " head " << h << " channel " << d;
      }
    }
}

struct EveryWay {
  std::initializer_list<int> world_sizes = {1, 2, 4};
  std::initializer_list<std::int64_t> chunk_sizes = {1, 2};
};

/// Calls check(result) for every CP size, sharding and chunk size, and requires the bits to be
/// those of one rank.
inline void for_every_way(AttentionCase problem, const EveryWay& ways,
                          const std::function<void(const Attended&)>& check) {
  for (const std::int64_t chunk_tokens : ways.chunk_sizes) {
    problem.config.chunk_tokens = chunk_tokens;
    problem.config.sharding = ShardingKind::contiguous;
    const Attended one_rank = attend(problem);
    for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
      for (const int world_size : ways.world_sizes) {
        SCOPED_TRACE(cpattn::detail::concat(name_of(problem.dtype), " -> ",
                                            name_of(problem.out_dtype), ", ", name_of(sharding),
                                            ", chunks of ", chunk_tokens, ", CP", world_size));
        problem.config.sharding = sharding;
        const Attended result = attend(problem, world_size);
        check(result);
        EXPECT_TRUE(bits_equal(result.out, one_rank.out));
        EXPECT_TRUE(bits_equal(result.lse, one_rank.lse));
        if (::testing::Test::HasFailure()) return;
      }
  }
}

inline void expect_everywhere(const AttentionCase& problem, const Answer& answer,
                              const EveryWay& ways = {}, const Slack& slack = {}) {
  for_every_way(problem, ways,
                [&](const Attended& result) { expect_answer(problem, result, answer, slack); });
}

/// The default run of the reports: f32 and bf16, here f16 too.
inline constexpr std::initializer_list<DType> kAllDTypes = {DType::f32, DType::bf16, DType::f16};

/// Sum of 0 .. n-1 over n, for the U-recipe with n visible keys from the first on.
inline RowAnswer first_keys(std::int64_t n) {
  if (n <= 0) return {};
  return {static_cast<double>(n - 1) / 2, std::log(static_cast<double>(n))};
}

}  // namespace cpattn::testing
