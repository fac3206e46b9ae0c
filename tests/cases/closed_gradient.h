// Gradients in closed form, for every CP size, sharding, chunk size and input type.
//
// With K = 0 every row spreads its weight evenly over the n keys it sees: p = 1 / n, out is the
// mean of their values, ds = p (dout.v - dout.out). So each gradient is a sum of a few rational
// terms.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "kernels/reference/gradient.h"
#include "tests/cases/closed_form.h"
#include "tests/support/attend_backward.h"

namespace cpattn::testing {

/// A gradient element, and the sum of the magnitudes of what it is summed from.
struct Sum {
  double value = 0.0;
  double size = 0.0;
  void add(double term, double magnitude) {
    value += term;
    size += std::abs(magnitude);
  }
};

/// The right answer of all channels of a (row, head); nothing: not asked.
struct GradientAnswer {
  std::function<Sum(std::int64_t row, std::int64_t head)> dq;
  std::function<Sum(std::int64_t row, std::int64_t head)> dk;
  std::function<Sum(std::int64_t row, std::int64_t head)> dv;
};

/// dout of ones in the rows of documents, NaN in padding.
inline Upstream ones_upstream(const AttentionCase& problem) {
  Upstream upstream;
  upstream.dout = HostTensor(
      problem.out_dtype, {problem.batch.q_rows, problem.shape.num_heads, problem.shape.value_dim});
  for (const Document& document : problem.batch.documents)
    for (std::int64_t i = 0; i < document.q_tokens; ++i)
      for (std::int64_t h = 0; h < problem.shape.num_heads; ++h)
        for (std::int64_t d = 0; d < problem.shape.value_dim; ++d)
          upstream.dout.set(document.q_begin + i, h, d, 1.0f);
  return upstream;
}

/// Whether a document covers each row of one side.
inline std::vector<bool> covered_rows(const SequenceBatch& batch, bool of_keys) {
  std::vector<bool> covered(static_cast<std::size_t>(of_keys ? batch.kv_rows : batch.q_rows));
  for (const Document& document : batch.documents) {
    const std::int64_t begin = of_keys ? document.kv_begin : document.q_begin;
    for (std::int64_t i = 0; i < (of_keys ? document.kv_tokens : document.q_tokens); ++i)
      covered[static_cast<std::size_t>(begin + i)] = true;
  }
  return covered;
}

/// Padding belongs to no rank, so nobody writes it: it stays the NaN that tests fill results with.
inline void expect_padding_untouched(const AttentionCase& problem, const Gradients& result) {
  for (const bool of_keys : {false, true}) {
    const std::vector<bool> covered = covered_rows(problem.batch, of_keys);
    for (std::size_t row = 0; row < covered.size(); ++row) {
      const auto at = static_cast<std::int64_t>(row);
      if (of_keys) {
        EXPECT_EQ(std::isnan(result.dk.at(at, 0, 0)), !covered[row]) << "dk row " << row;
        EXPECT_EQ(std::isnan(result.dv.at(at, 0, 0)), !covered[row]) << "dv row " << row;
      } else {
        EXPECT_EQ(std::isnan(result.dq.at(at, 0, 0)), !covered[row]) << "dq row " << row;
      }
    }
  }
}

/// A term of a sum of so many is off by at most a rounding per addition and a dozen of its own
/// (powers of two, lse, delta); with bf16 weights it and what it was made from are rounded, too.
inline double relative_slack(const AttentionCase& problem) {
  const bool rounds =
      default_kernels().numerics(problem.dtype).find("bf16-dot") != std::string_view::npos;
  const auto terms = static_cast<double>((problem.batch.q_rows + problem.batch.kv_rows) *
                                         problem.shape.group_size());
  return (terms + 12) * 0x1p-24 + (rounds ? 4 * 0x1p-8 : 0.0);
}

inline void expect_gradient(const AttentionCase& problem, const HostTensor& actual, bool of_keys,
                            const std::function<Sum(std::int64_t, std::int64_t)>& answer,
                            std::string_view name) {
  if (!answer) return;
  const std::vector<bool> covered = covered_rows(problem.batch, of_keys);
  const auto& shape = actual.shape();
  for (std::int64_t row = 0; row < shape[0]; ++row)
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      if (!covered[static_cast<std::size_t>(row)]) continue;
      const Sum want = answer(row, h);
      for (std::int64_t d = 0; d < shape[2]; ++d)
        EXPECT_NEAR(actual.at(row, h, d), want.value, relative_slack(problem) * want.size)
            << name << " row " << row << " head " << h << " channel " << d;
    }
}

/// Calls check(result) for every way to run, and requires the bits of one rank.
inline void for_every_backward(AttentionCase problem, const Upstream& upstream,
                               const EveryWay& ways,
                               const std::function<void(const Gradients&)>& check) {
  for (const std::int64_t chunk_tokens : ways.chunk_sizes) {
    problem.config.chunk_tokens = chunk_tokens;
    problem.config.sharding = ShardingKind::contiguous;
    const Gradients one_rank = differentiate(problem, upstream);
    for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
      for (const int world_size : ways.world_sizes) {
        SCOPED_TRACE(cpattn::detail::concat(name_of(problem.dtype), ", ", name_of(sharding),
                                            ", chunks of ", chunk_tokens, ", CP", world_size));
        problem.config.sharding = sharding;
        const Gradients result = differentiate(problem, upstream, world_size);
        check(result);
        EXPECT_TRUE(same(result, one_rank));
        if (::testing::Test::HasFailure()) return;
      }
  }
}

inline void expect_gradients_everywhere(const AttentionCase& problem, const Upstream& upstream,
                                        const GradientAnswer& answer, const EveryWay& ways = {}) {
  for_every_backward(problem, upstream, ways, [&](const Gradients& result) {
    expect_gradient(problem, result.dq, false, answer.dq, "dq");
    expect_gradient(problem, result.dk, true, answer.dk, "dk");
    expect_gradient(problem, result.dv, true, answer.dv, "dv");
    expect_padding_untouched(problem, result);
  });
}

/// One channel of q and k, one of v; scale 1; K = 0, Q = 1, V[j] = place of key j in its document.
/// NaN in all padding.
inline AttentionCase even_weights(const SequenceBatch& batch, MaskKind mask, DType dtype,
                                  std::int64_t heads = 1, std::int64_t kv_heads = 1) {
  AttentionCase problem =
      make_case({heads, kv_heads, 1, 1, 1.0}, batch, test_config(mask, 1), dtype);
  problem.out_dtype = DType::f32;
  for (const Document& document : batch.documents) {
    for (std::int64_t i = 0; i < document.q_tokens; ++i)
      for (std::int64_t h = 0; h < heads; ++h) problem.q.set(document.q_begin + i, h, 0, 1.0f);
    for (std::int64_t j = 0; j < document.kv_tokens; ++j)
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        problem.k.set(document.kv_begin + j, h, 0, 0.0f);
        problem.v.set(document.kv_begin + j, h, 0, static_cast<float>(j));
      }
  }
  return problem;
}

/// dk and dv of a key of even_weights() under dout = 1: over the rows of its document that see it,
/// the sums of (v_j - mean) / n and of 1 / n, once for every head of the group.
inline GradientAnswer even_weights_answer(const AttentionCase& problem) {
  const auto sum_rows = [&problem](std::int64_t key, bool is_dk) {
    Sum sum;
    for (const Document& document : problem.batch.documents) {
      const std::int64_t j = key - document.kv_begin;
      if (j < 0 || j >= document.kv_tokens) continue;
      for (std::int64_t i = 0; i < document.q_tokens; ++i) {
        const std::int64_t n = problem.config.mask == MaskKind::full
                                   ? document.kv_tokens
                                   : i + 1 + document.kv_tokens - document.q_tokens;
        if (j >= n) continue;
        const double p = 1.0 / static_cast<double>(n), mean = static_cast<double>(n - 1) / 2;
        const double value = static_cast<double>(j);
        for (std::int64_t h = 0; h < problem.shape.group_size(); ++h)
          sum.add(is_dk ? p * (value - mean) : p, is_dk ? p * (value + mean) : p);
      }
    }
    return sum;
  };
  return {.dq = [](auto, auto) { return Sum{}; },
          .dk = [sum_rows](std::int64_t key, auto) { return sum_rows(key, true); },
          .dv = [sum_rows](std::int64_t key, auto) { return sum_rows(key, false); }};
}

/// Gradients of a whole problem in double precision.
inline reference::Gradient reference_gradient_of(const AttentionCase& problem,
                                                 const Upstream& upstream) {
  const HostTensor& dout = upstream.dout;
  return reference::gradient(
      {.shape = problem.shape,
       .batch = problem.batch,
       .mask = problem.config.mask,
       .q = problem.q.view(),
       .k = problem.k.view(),
       .v = problem.v.view(),
       .dout = dout.view(),
       .dlse = upstream.dlse.empty()
                   ? reference::Tensor()
                   : contiguous_tensor(static_cast<const void*>(upstream.dlse.data()), DType::f32,
                                       {problem.batch.q_rows, problem.shape.num_heads, 1}),
       .num_threads = 1});
}

/// Relative L2 distance, over the rows that documents cover.
inline double relative_l2(const AttentionCase& problem, const HostTensor& actual, bool of_keys,
                          const std::vector<double>& expected) {
  const std::vector<bool> covered = covered_rows(problem.batch, of_keys);
  double difference = 0.0, norm = 0.0;
  const auto& shape = actual.shape();
  std::size_t i = 0;
  for (std::int64_t row = 0; row < shape[0]; ++row)
    for (std::int64_t h = 0; h < shape[1]; ++h)
      for (std::int64_t d = 0; d < shape[2]; ++d, ++i) {
        if (!covered[static_cast<std::size_t>(row)]) continue;
        const double error = static_cast<double>(actual.at(row, h, d)) - expected[i];
        difference += error * error;
        norm += expected[i] * expected[i];
      }
  return std::sqrt(difference / norm);
}

}  // namespace cpattn::testing
