// attend(): a whole problem through Plan and RingAttention on P loopback ranks, from global inputs
// to global outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cp/ring_attention.h"
#include "src/base/error.h"
#include "src/comm/loopback_comm.h"
#include "tests/support/run_kernels.h"

namespace cpattn::testing {

inline Problem problem_of(const AttentionCase& problem) {
  return {.shape = problem.shape,
          .batch = problem.batch,
          .dtype = problem.dtype,
          .out_dtype = problem.out_dtype};
}

/// One rank's rows of a problem: inputs cut out of the global ones, outputs still NaN.
struct RankTensors {
  HostTensor q, k, v, out;
  std::vector<float> lse;

  RankTensors(const AttentionCase& problem, const Shard& shard)
      : q(problem.q.rows(global_rows(shard.q))),
        k(problem.k.rows(global_rows(shard.kv))),
        v(problem.v.rows(global_rows(shard.kv))),
        out(problem.out_dtype, {shard.q_rows, problem.shape.num_heads, problem.shape.value_dim}),
        lse(static_cast<std::size_t>(shard.q_rows * problem.shape.num_heads), kNan) {}

  ForwardTensors views() {
    const HostTensor &cq = q, &ck = k, &cv = v;
    return {cq.view(), ck.view(), cv.view(), out.view(),
            contiguous_view(lse.data(), std::array{out.shape()[0], out.shape()[1]})};
  }

  /// Puts out and lse back into their global rows.
  void scatter(const Shard& shard, Attended& whole) const {
    const std::vector<std::int64_t> rows = global_rows(shard.q);
    const auto heads = static_cast<std::size_t>(out.shape()[1]);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      whole.out.copy_row(rows[i], out, static_cast<std::int64_t>(i));
      for (std::size_t h = 0; h < heads; ++h)
        whole.lse[static_cast<std::size_t>(rows[i]) * heads + h] = lse[i * heads + h];
    }
  }
};

/// Everything still NaN except rows that no document covers: no rank owns those, and a caller that
/// gathers them gets what the contract says of padding.
inline Attended unset_global_result(const AttentionCase& problem) {
  Attended whole = unset_result(problem);
  std::vector<bool> is_owned(static_cast<std::size_t>(problem.batch.q_rows), false);
  for (const Document& document : problem.batch.documents)
    for (std::int64_t i = 0; i < document.q_tokens; ++i)
      is_owned[static_cast<std::size_t>(document.q_begin + i)] = true;
  for (std::int64_t row = 0; row < problem.batch.q_rows; ++row) {
    if (is_owned[static_cast<std::size_t>(row)]) continue;
    for (std::int64_t h = 0; h < problem.shape.num_heads; ++h) {
      whole.lse[static_cast<std::size_t>(row * problem.shape.num_heads + h)] = -kInf;
      for (std::int64_t d = 0; d < problem.shape.value_dim; ++d) whole.out.set(row, h, d, 0.0f);
    }
  }
  return whole;
}

struct AttendOptions {
  const KernelTable* kernels = nullptr;  ///< nullptr: default_kernels()
  std::uint64_t shuffle_delivery = 0;    ///< seed of the loopback transport
  int repeats = 1;                       ///< forward() calls on the same RingAttention
};

inline Attended attend(const AttentionCase& problem, int world_size = 1,
                       const AttendOptions& options = {}) {
  const KernelTable& kernels = options.kernels != nullptr ? *options.kernels : default_kernels();
  Attended whole = unset_global_result(problem);
  std::vector<Plan> plans;
  std::vector<RankTensors> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    plans.emplace_back(problem_of(problem), problem.config, kernels, rank, world_size);
    ranks.emplace_back(problem, plans.back().shard());
  }
  LoopbackWorld world(world_size, {.shuffle_seed = options.shuffle_delivery});
  world.run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    RingAttention attention(plans[rank], comm);
    for (int i = 0; i < options.repeats; ++i) attention.forward(ranks[rank].views());
  });
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    ranks[rank].scatter(plans[rank].shard(), whole);
  return whole;
}

/// Runs `body` on every rank and returns, by rank, the text of the InvalidArgument it threw ("" for
/// none). For refusals, which come to all ranks.
inline std::vector<std::string> refusals(int world_size,
                                         const std::function<void(Communicator&)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(world_size));
  LoopbackWorld(world_size).run([&](Communicator& comm) {
    try {
      body(comm);
    } catch (const InvalidArgument& error) {
      texts[static_cast<std::size_t>(comm.rank())] = error.what();
    }
  });
  return texts;
}

}  // namespace cpattn::testing
