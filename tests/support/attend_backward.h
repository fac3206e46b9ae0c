// differentiate(): the backward twin of attend(): forward, then backward, on P loopback ranks, from
// global inputs to global gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cp/ring_gradient.h"
#include "tests/support/attend.h"
#include "tests/support/compare.h"
#include "tests/support/run_gradient.h"

namespace cpattn::testing {

/// What comes back from the layers above, for a whole problem.
struct Upstream {
  HostTensor dout;          ///< [q_rows, Hq, Dv]
  std::vector<float> dlse;  ///< [q_rows, Hq], or empty: zeros
};

/// Standard normal, also in rows that no document covers: nobody may read those.
inline Upstream random_upstream(const AttentionCase& problem, std::uint64_t seed,
                                bool has_dlse = true) {
  Upstream result;
  const std::int64_t rows = problem.batch.q_rows, heads = problem.shape.num_heads;
  result.dout = HostTensor(problem.out_dtype, {rows, heads, problem.shape.value_dim});
  result.dout.fill_normal(1000 + seed);
  for (std::int64_t i = 0; has_dlse && i < rows * heads; ++i)
    result.dlse.push_back(random_normal(2000 + seed, static_cast<std::uint64_t>(i)));
  return result;
}

/// One rank's rows of the backward; gradients still NaN.
struct RankGradients {
  RankTensors forward;
  HostTensor dout, dq, dk, dv;
  std::vector<float> dlse;

  RankGradients(const AttentionCase& problem, const Upstream& upstream, const Shard& shard,
                DType dtype)
      : forward(problem, shard),
        dout(upstream.dout.rows(global_rows(shard.q))),
        dq(dtype, forward.q.shape()),
        dk(dtype, forward.k.shape()),
        dv(dtype, forward.v.shape()) {
    if (upstream.dlse.empty()) return;
    const std::int64_t heads = problem.shape.num_heads;
    for (const std::int64_t row : global_rows(shard.q))
      for (std::int64_t h = 0; h < heads; ++h)
        dlse.push_back(upstream.dlse[static_cast<std::size_t>(row * heads + h)]);
  }

  BackwardTensors views() {
    const ForwardTensors f = forward.views();
    const HostTensor& up = dout;
    const TensorView<const float, 2> no_dlse;
    const std::array shape{f.lse.shape[0], f.lse.shape[1]};
    return {.q = f.q,
            .k = f.k,
            .v = f.v,
            .out = f.out,
            .lse = {f.lse.data, f.lse.shape, f.lse.strides},
            .dout = up.view(),
            .dlse = dlse.empty() ? no_dlse
                                 : contiguous_view(static_cast<const float*>(dlse.data()), shape),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view()};
  }

  /// Puts the gradients back into their global rows.
  void scatter(const Shard& shard, Gradients& whole) const {
    const auto put = [](const std::vector<OwnedChunk>& chunks, const HostTensor& from,
                        HostTensor& to) {
      const std::vector<std::int64_t> rows = global_rows(chunks);
      for (std::size_t i = 0; i < rows.size(); ++i)
        to.copy_row(rows[i], from, static_cast<std::int64_t>(i));
    };
    put(shard.q, dq, whole.dq);
    put(shard.kv, dk, whole.dk);
    put(shard.kv, dv, whole.dv);
  }
};

struct DifferentiateOptions {
  const KernelTable* kernels = nullptr;  ///< nullptr: default_kernels()
  std::uint64_t shuffle_delivery = 0;    ///< seed of the loopback transport
  int repeats = 1;                       ///< backward() calls on the same RingGradient
  DType dtype = DType::f32;              ///< of the gradients
};

/// Rows that no document covers stay NaN: no rank owns them.
inline Gradients differentiate(const AttentionCase& problem, const Upstream& upstream,
                               int world_size = 1, const DifferentiateOptions& options = {}) {
  const KernelTable& kernels = options.kernels != nullptr ? *options.kernels : default_kernels();
  Gradients whole{HostTensor(options.dtype, problem.q.shape()),
                  HostTensor(options.dtype, problem.k.shape()),
                  HostTensor(options.dtype, problem.v.shape())};
  std::vector<Plan> plans;
  std::vector<RankGradients> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    plans.emplace_back(problem_of(problem), problem.config, kernels, rank, world_size);
    ranks.emplace_back(problem, upstream, plans.back().shard(), options.dtype);
  }
  LoopbackWorld world(world_size, {.shuffle_seed = options.shuffle_delivery});
  world.run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const GradientPlan gradient(plans[rank]);
    RingAttention(plans[rank], comm).forward(ranks[rank].forward.views());
    RingGradient backward(plans[rank], gradient, comm);
    for (int i = 0; i < options.repeats; ++i) backward.backward(ranks[rank].views());
  });
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    ranks[rank].scatter(plans[rank].shard(), whole);
  return whole;
}

inline ::testing::AssertionResult same(const Gradients& actual, const Gradients& expected) {
  auto result = bits_equal(actual.dq, expected.dq);
  if (!result) return result << " (dq)";
  result = bits_equal(actual.dk, expected.dk);
  if (!result) return result << " (dk)";
  result = bits_equal(actual.dv, expected.dv);
  if (!result) return result << " (dv)";
  return result;
}

}  // namespace cpattn::testing
