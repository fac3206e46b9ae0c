// OneLayer: a problem, its upstream gradient, and the bits that one rank with everything gets;
// run() asks a PlannedAttention for its rows of them.
#pragma once

#include <memory>
#include <string>

#include "cp/context_parallel.h"
#include "tests/support/attend_backward.h"

namespace cpattn::testing {

class OneLayer {
 public:
  OneLayer(const AttentionCase& problem, std::uint64_t seed)
      : problem_(problem),
        upstream_(random_upstream(problem, seed)),
        out_(attend(problem)),
        gradients_(differentiate(problem, upstream_)) {}

  const AttentionCase& problem() const { return problem_; }
  Problem stated() const { return problem_of(problem_); }

  /// Forward and backward through the face; this rank's rows must be those of one rank.
  void run(PlannedAttention& planned) const {
    const Shard& shard = planned.plan().shard();
    RankGradients rank(problem_, upstream_, shard, DType::f32);
    planned.forward(rank.forward.views());
    planned.backward(rank.views());
    const auto q_rows = global_rows(shard.q), kv_rows = global_rows(shard.kv);
    EXPECT_TRUE(bits_equal(rank.forward.out, out_.out.rows(q_rows)));
    EXPECT_TRUE(bits_equal(rank.dq, gradients_.dq.rows(q_rows)));
    EXPECT_TRUE(bits_equal(rank.dk, gradients_.dk.rows(kv_rows)));
    EXPECT_TRUE(bits_equal(rank.dv, gradients_.dv.rows(kv_rows)));
    const auto heads = static_cast<std::size_t>(problem_.shape.num_heads);
    for (std::size_t i = 0; i < q_rows.size(); ++i)
      for (std::size_t h = 0; h < heads; ++h)
        EXPECT_EQ(std::bit_cast<std::uint32_t>(rank.forward.lse[i * heads + h]),
                  std::bit_cast<std::uint32_t>(
                      out_.lse[static_cast<std::size_t>(q_rows[i]) * heads + h]));
  }

 private:
  AttentionCase problem_;
  Upstream upstream_;
  Attended out_;
  Gradients gradients_;
};

/// A communicator of the test's as a group.
inline std::shared_ptr<Communicator> borrowed(Communicator& comm) {
  return {&comm, [](Communicator*) {}};
}

}  // namespace cpattn::testing
