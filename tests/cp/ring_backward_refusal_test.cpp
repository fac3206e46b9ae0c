// What the distributed backward refuses, and that it does so on every rank.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "src/comm/forwarding_comm.h"
#include "tests/support/attend_backward.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

AttentionCase usual_case() {
  return make_random_case(make_shape(4, 2, 16, 12), pack({40, 24}),
                          test_config(MaskKind::causal, 8), DType::f32, 1);
}

using Change = std::function<void(BackwardTensors&)>;

/// Every rank calls backward() with tensors after `change`, which rank `only` alone applies (all of
/// them when it is negative); then once more with the right ones, which must work.
std::vector<std::string> told(int world_size, const Change& change, int only = -1) {
  const AttentionCase problem = usual_case();
  const Upstream upstream = random_upstream(problem, 1);
  return refusals(world_size, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                    comm.size());
    const GradientPlan gradient(plan);
    RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
    RingAttention(plan, comm).forward(tensors.forward.views());
    RingGradient backward(plan, gradient, comm);
    BackwardTensors views = tensors.views();
    if (only < 0 || only == comm.rank()) change(views);
    std::string refusal;
    try {
      backward.backward(views);
    } catch (const InvalidArgument& error) {
      refusal = error.what();
    }
    backward.backward(tensors.views());
    EXPECT_FALSE(std::isnan(tensors.dq.at(0, 0, 0)));
    require(refusal.empty(), refusal);
  });
}

void expect_named(const std::string& name, const Change& change) {
  for (const std::string& text : told(2, change)) {
    const bool is_alike = text.find("ranks 0, 1: " + name) == 0;
    for (const std::string rank : {"rank 0: ", "rank 1: "})  // everybody hears of both
      EXPECT_TRUE(is_alike || text.find(rank + name) != std::string::npos) << text;
  }
}

TEST(RingBackwardRefusal, RightTensorsAreTaken) {
  for (const std::string& text : told(2, [](BackwardTensors&) {})) EXPECT_EQ(text, "");
  for (const std::string& text : told(2, [](BackwardTensors& t) { t.dlse = {}; }))
    EXPECT_EQ(text, "") << "no dlse";
}

// The stride of a dimension of one element is never used, and may be anything.
TEST(RingBackwardRefusal, AHeadOfOneChannelMayHaveAnyLastStride) {
  const AttentionCase problem = make_random_case(make_shape(2, 1, 1, 1), batch_of_one(20, 20),
                                                 test_config(MaskKind::causal, 4), DType::f32, 3);
  const Upstream upstream = random_upstream(problem, 1);
  LoopbackWorld(2).run([&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), 2);
    const GradientPlan gradient(plan);
    RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
    ForwardTensors forward = tensors.forward.views();
    forward.q.strides[2] = forward.k.strides[2] = forward.out.strides[2] = 7;
    RingAttention(plan, comm).forward(forward);
    BackwardTensors backward = tensors.views();
    backward.q.strides[2] = backward.dout.strides[2] = backward.dq.strides[2] = 7;
    backward.dk.strides[2] = backward.dv.strides[2] = 7;
    RingGradient(plan, gradient, comm).backward(backward);
    EXPECT_FALSE(std::isnan(tensors.dq.at(0, 0, 0)));
  });
}

TEST(RingBackwardRefusal, TensorsThatDoNotFit) {
  expect_named("q:", [](BackwardTensors& t) { t.q.shape[0] -= 1; });
  expect_named("k:", [](BackwardTensors& t) { t.k.dtype = DType::f16; });
  expect_named("v:", [](BackwardTensors& t) { t.v.strides[2] = 2; });
  expect_named("out:", [](BackwardTensors& t) { t.out.dtype = DType::bf16; });
  expect_named("lse:", [](BackwardTensors& t) { t.lse.shape[1] = 2; });
  expect_named("lse:", [](BackwardTensors& t) { t.lse.data = nullptr; });
  expect_named("dout:", [](BackwardTensors& t) { t.dout.dtype = DType::f16; });
  expect_named("dout:", [](BackwardTensors& t) { t.dout.data = nullptr; });
  expect_named("dlse:", [](BackwardTensors& t) { t.dlse.shape[0] += 1; });
  expect_named("dq:", [](BackwardTensors& t) { t.dq.shape[1] = 2; });
  expect_named("dk:", [](BackwardTensors& t) { t.dk.shape[2] += 1; });
  expect_named("dv:", [](BackwardTensors& t) { t.dv.strides[2] = 3; });
}

TEST(RingBackwardRefusal, ATypeIsExpectedOnce) {
  for (const std::string& text : told(1, [](BackwardTensors& t) { t.dout.dtype = DType::bf16; })) {
    EXPECT_NE(text.find("expected f32 ["), std::string::npos) << text;  // out's type is f32, too
  }
}

TEST(RingBackwardRefusal, AllProblemsAreNamedAtOnce) {
  for (const std::string& text : told(2, [](BackwardTensors& t) {
         t.q.shape[0] += 1;
         t.dv.data = nullptr;
       })) {
    EXPECT_NE(text.find("q: f32 ["), std::string::npos) << text;
    EXPECT_NE(text.find("dv: f32 ["), std::string::npos) << text;
    EXPECT_NE(text.find("null"), std::string::npos) << text;
  }
}

TEST(RingBackwardRefusal, OneRanksWrongTensorsAreRefusedOnEveryRank) {
  for (const std::string& text : told(
           3, [](BackwardTensors& t) { t.dk.shape[0] += 1; }, 2)) {
    EXPECT_EQ(text.find("rank 2: dk: "), 0u) << text;
    EXPECT_EQ(text.find("rank 0"), std::string::npos) << text;
  }
}

TEST(RingBackwardRefusal, OutputsThatAliasAnything) {
  expect_named("dq: shares elements with q",
               [](BackwardTensors& t) { t.dq.data = const_cast<void*>(t.q.data); });
  expect_named("dk: shares elements with dv", [](BackwardTensors& t) { t.dv.data = t.dk.data; });
  expect_named("dv: shares elements with dout",
               [](BackwardTensors& t) { t.dv.data = const_cast<void*>(t.dout.data); });
  expect_named("dq: shares elements with lse",
               [](BackwardTensors& t) { t.lse.data = static_cast<const float*>(t.dq.data); });
  expect_named("dq: its rows overlap each other",
               [](BackwardTensors& t) { t.dq.strides[1] = t.dq.shape[2] - 1; });
}

TEST(RingBackwardRefusal, InterleavedViewsOfOneBufferAreFine) {
  // q, k, v and their gradients as slices of two fused [T, Hq + 2 Hkv, D] buffers.
  const AttentionCase problem = make_random_case(make_shape(4, 2, 16, 16), pack({40, 24}),
                                                 test_config(MaskKind::causal, 8), DType::f32, 3);
  const Upstream upstream = random_upstream(problem, 3);
  const Gradients expected = differentiate(problem, upstream);
  LoopbackWorld(2).run([&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), 2);
    const GradientPlan gradient(plan);
    RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
    RingAttention(plan, comm).forward(tensors.forward.views());
    BackwardTensors views = tensors.views();
    HostTensor fused(DType::f32, {plan.shard().q_rows, 8, 16}), gradients = fused;
    const auto slice = [](HostTensor& whole, std::int64_t first, std::int64_t heads) {
      AnyTensor part = whole.view();
      part.data = part.row(0, first);
      part.shape[1] = heads;
      return part;
    };
    for (std::int64_t t = 0; t < plan.shard().q_rows; ++t)
      for (std::int64_t h = 0; h < 8; ++h)
        for (std::int64_t d = 0; d < 16; ++d) {
          const HostTensor& source = h < 4   ? tensors.forward.q
                                     : h < 6 ? tensors.forward.k
                                             : tensors.forward.v;
          fused.set(t, h, d, source.at(t, h < 4 ? h : (h - 4) % 2, d));
        }
    views.q = slice(fused, 0, 4);
    views.k = slice(fused, 4, 2);
    views.v = slice(fused, 6, 2);
    views.dq = slice(gradients, 0, 4);
    views.dk = slice(gradients, 4, 2);
    views.dv = slice(gradients, 6, 2);
    RingGradient(plan, gradient, comm).backward(views);
    const std::vector<std::int64_t> rows = global_rows(plan.shard().q);
    const Gradients mine{expected.dq.rows(rows), expected.dk.rows(rows), expected.dv.rows(rows)};
    for (std::int64_t t = 0; t < plan.shard().q_rows; ++t)
      for (std::int64_t h = 0; h < 8; ++h)
        for (std::int64_t d = 0; d < 16; ++d) {
          const HostTensor& source = h < 4 ? mine.dq : h < 6 ? mine.dk : mine.dv;
          ASSERT_EQ(gradients.bits_at(t, h, d), source.bits_at(t, h < 4 ? h : (h - 4) % 2, d));
        }
  });
}

TEST(RingBackwardRefusal, DifferingPlansAreNamedOnEveryRank) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(3, [&](Communicator& comm) {
    Problem stated = problem_of(problem);
    if (comm.rank() == 1) stated.shape.num_kv_heads = 1;
    const Plan plan(stated, problem.config, default_kernels(), comm.rank(), comm.size());
    const GradientPlan gradient(plan);
    RingGradient backward(plan, gradient, comm);
  });
  for (const std::string& text : texts)
    EXPECT_NE(text.find("num_kv_heads"), std::string::npos) << text;
}

TEST(RingBackwardRefusal, APlanOfAnotherRankIsRefused) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(2, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), 1 - comm.rank(), 2);
    const GradientPlan gradient(plan);
    RingGradient backward(plan, gradient, comm);
  });
  for (const std::string& text : texts) EXPECT_NE(text.find("plan of rank"), std::string::npos);
}

/// Loses what it sends on one tag, as a peer that stopped would.
class SilentComm : public ForwardingComm {
 public:
  SilentComm(Communicator& inner, Tag tag) : ForwardingComm(inner), tag_(tag) {}
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    return tag == tag_ ? Pending{} : ForwardingComm::isend(bytes, peer, tag);
  }

 private:
  Tag tag_;
};

TEST(RingBackwardRefusal, APeerThatNeverAnswersEndsAtTheDeadline) {
  AttentionCase problem = usual_case();
  problem.config.timeout_seconds = 1.0;
  const Upstream upstream = random_upstream(problem, 1);
  for (const Tag tag : {Tag::direct_payload, Tag::direct_header, Tag::ring_payload}) {
    LoopbackWorld world(2, {.must_receive_all = false});
    const Clock::time_point started = Clock::now();
    std::string text;
    EXPECT_THROW(world.run([&](Communicator& comm) {
      const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                      comm.size());
      const GradientPlan gradient(plan);
      RankGradients tensors(problem, upstream, plan.shard(), DType::f32);
      RingAttention(plan, comm).forward(tensors.forward.views());
      SilentComm silent(comm, tag);
      Communicator& used = comm.rank() == 0 ? silent : comm;
      RingGradient backward(plan, gradient, used);
      try {
        backward.backward(tensors.views());
      } catch (const CommError& error) {
        if (comm.rank() == 1) {
          text = error.what();
          EXPECT_THROW(backward.backward(tensors.views()), CommError) << "not a second time";
          throw;
        }
        // Rank 0 may wait in vain too, for what rank 1 never comes to send.
      }
      comm.barrier(deadline_after(Seconds(30)), "rank 1 gave up");
    }),
                 CommError);
    const char* step = tag == Tag::ring_payload ? "step 0" : "step 1";
    EXPECT_NE(text.find(step), std::string::npos) << text;
    EXPECT_NE(text.find("nothing from rank 0 within 1 s ("), std::string::npos) << text;
    EXPECT_NE(text.find("bytes expected)"), std::string::npos) << text;
    EXPECT_LT(Seconds(Clock::now() - started), Seconds(20));
  }
}

}  // namespace
}  // namespace cpattn::testing
