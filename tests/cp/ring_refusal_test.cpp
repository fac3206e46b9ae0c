// What the distributed forward refuses, and that it does so on every rank.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cp/ring_setup.h"
#include "tests/support/attend.h"
#include "tests/support/batches.h"

namespace cpattn::testing {
namespace {

AttentionCase usual_case() {
  return make_random_case(make_shape(4, 2, 16, 12), pack({40, 24}),
                          test_config(MaskKind::causal, 8), DType::f32, 1);
}

/// Every rank plans `usual_case()`, rank 1 after `change`; returns what each rank was told.
std::vector<std::string> told_when_rank_one_differs(
    const std::function<void(Problem&, CpConfig&)>& change) {
  return refusals(3, [&](Communicator& comm) {
    const AttentionCase problem = usual_case();
    Problem stated = problem_of(problem);
    CpConfig config = problem.config;
    if (comm.rank() == 1) change(stated, config);
    const Plan plan(stated, config, default_kernels(), comm.rank(), comm.size());
    RingAttention attention(plan, comm);
  });
}

void expect_all_name(const std::vector<std::string>& texts, const std::string& key) {
  for (const std::string& text : texts) EXPECT_NE(text.find(key), std::string::npos) << text;
}

TEST(RingRefusal, EqualPlansAreAgreedOn) {
  for (const std::string& text : told_when_rank_one_differs([](Problem&, CpConfig&) {}))
    EXPECT_EQ(text, "");
  for (const std::string& text :
       told_when_rank_one_differs([](Problem&, CpConfig& config) { config.threads = 2; }))
    EXPECT_EQ(text, "");
}

TEST(RingRefusal, ADifferingKnobIsNamedOnEveryRank) {
  const auto differing = [](auto&& change) {
    return told_when_rank_one_differs([&](Problem&, CpConfig& config) { change(config); });
  };
  expect_all_name(differing([](CpConfig& c) { c.mask = MaskKind::full; }), "mask");
  expect_all_name(differing([](CpConfig& c) { c.sharding = ShardingKind::contiguous; }),
                  "sharding");
  expect_all_name(differing([](CpConfig& c) { c.schedule = ScheduleKind::arrival; }), "schedule");
  expect_all_name(differing([](CpConfig& c) { c.chunk_tokens = 16; }), "chunk_tokens");
  expect_all_name(differing([](CpConfig& c) { c.max_message_bytes = 4096; }), "max_message_bytes");
  expect_all_name(differing([](CpConfig& c) { c.verify_checksum = true; }), "verify_checksum");
  expect_all_name(differing([](CpConfig& c) { c.shuffle_arrival = 9; }), "shuffle_arrival");
}

TEST(RingRefusal, ADifferingProblemIsNamedOnEveryRank) {
  const auto differing = [](auto&& change) {
    return told_when_rank_one_differs([&](Problem& problem, CpConfig&) { change(problem); });
  };
  expect_all_name(differing([](Problem& p) { p.shape.num_kv_heads = 4; }), "num_kv_heads");
  expect_all_name(differing([](Problem& p) { p.shape.softmax_scale = 0.5; }), "softmax_scale");
  expect_all_name(differing([](Problem& p) { p.dtype = DType::bf16; }), "dtype");
  const auto texts = differing([](Problem& p) { p.batch = pack({24, 40}); });
  for (const std::string& text : texts) EXPECT_NE(text, "");
}

TEST(RingRefusal, KernelsOfOtherNumericsAreNamedOnEveryRank) {
  // Tables that compute other bits must not be mixed; those that compute the same may.
  const auto tables = available_kernels();
  for (const KernelTable* table : tables) {
    const bool is_same = table->numerics(DType::bf16) == tables[0]->numerics(DType::bf16);
    const auto texts = refusals(2, [&](Communicator& comm) {
      AttentionCase problem = usual_case();
      problem.dtype = DType::bf16;
      const Plan plan(problem_of(problem), problem.config, comm.rank() == 0 ? *tables[0] : *table,
                      comm.rank(), comm.size());
      RingAttention attention(plan, comm);
    });
    for (const std::string& text : texts) {
      if (is_same) {
        EXPECT_EQ(text, "") << table->name;
      } else {
        EXPECT_NE(text.find("numerics"), std::string::npos) << table->name << ": " << text;
      }
    }
  }
}

TEST(RingRefusal, TensorsThatDoNotFitAreRefusedOnEveryRank) {
  const AttentionCase problem = usual_case();
  const auto told = [&](const std::function<void(ForwardTensors&)>& change) {
    return refusals(2, [&](Communicator& comm) {
      const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                      comm.size());
      RankTensors tensors(problem, plan.shard());
      RingAttention attention(plan, comm);
      ForwardTensors views = tensors.views();
      change(views);
      attention.forward(views);
    });
  };
  for (const std::string& text : told([](ForwardTensors&) {})) EXPECT_EQ(text, "");
  const auto expect_named = [&](const std::string& name, auto&& change) {
    for (const std::string& text : told(change)) {
      const bool is_alike = text.find("ranks 0, 1: " + name) == 0;
      for (const std::string rank : {"rank 0: ", "rank 1: "})  // everybody hears of both
        EXPECT_TRUE(is_alike || text.find(rank + name) != std::string::npos) << text;
    }
  };
  expect_named("q:", [](ForwardTensors& t) { t.q.shape[0] -= 1; });
  expect_named("q:", [](ForwardTensors& t) { t.q.dtype = DType::f16; });
  expect_named("k:", [](ForwardTensors& t) { t.k.shape[1] = 4; });
  expect_named("k:", [](ForwardTensors& t) { t.k.dtype = DType::f16; });
  expect_named("v:", [](ForwardTensors& t) { t.v.shape[2] = 16; });
  expect_named("v:", [](ForwardTensors& t) { t.v.strides[2] = 2; });
  expect_named("out:", [](ForwardTensors& t) { t.out.shape[0] += 1; });
  expect_named("out:", [](ForwardTensors& t) { t.out.dtype = DType::bf16; });
  expect_named("lse:", [](ForwardTensors& t) { t.lse.shape[1] = 2; });
  expect_named("lse:", [](ForwardTensors& t) { t.lse.data = nullptr; });
  expect_named("out: shares elements with q",
               [](ForwardTensors& t) { t.out.data = const_cast<void*>(t.q.data); });
  expect_named("out: shares elements with lse",
               [](ForwardTensors& t) { t.lse.data = static_cast<float*>(t.out.data); });
  expect_named("lse: shares elements with k", [](ForwardTensors& t) {
    t.lse.data = static_cast<float*>(const_cast<void*>(t.k.data));
  });
  expect_named("lse: its rows overlap each other", [](ForwardTensors& t) {
    t.lse.strides = {1, 1};
  });
}

TEST(RingRefusal, OneRanksWrongTensorsAreRefusedOnEveryRank) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(3, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                    comm.size());
    RankTensors tensors(problem, plan.shard());
    RingAttention attention(plan, comm);
    ForwardTensors views = tensors.views();
    if (comm.rank() == 2) views.q.shape[0] -= 1;
    attention.forward(views);
  });
  expect_all_name(texts, "rank 2: q:");
}

TEST(RingRefusal, TheSameTensorsWorkAfterARefusal) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(2, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                    comm.size());
    RankTensors tensors(problem, plan.shard());
    RingAttention attention(plan, comm);
    ForwardTensors wrong = tensors.views();
    wrong.out.shape[1] += 1;
    EXPECT_THROW(attention.forward(wrong), InvalidArgument);
    attention.forward(tensors.views());
    EXPECT_FALSE(std::isnan(tensors.lse[0]));
  });
  for (const std::string& text : texts) EXPECT_EQ(text, "");
}

// Both plans have messages of one size, so nothing else would tell.
TEST(RingRefusal, ARankThatCallsAnotherPlanOrPassEndsTheRing) {
  const AttentionCase problem = usual_case();
  Problem other = problem_of(problem);
  other.shape.softmax_scale *= 2;
  for (const bool is_same_pass : {true, false}) {
    const auto run = [&](Communicator& comm) {
      const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                      comm.size());
      const Plan scaled(other, problem.config, default_kernels(), comm.rank(), comm.size());
      RankTensors tensors(problem, plan.shard());
      RingAttention attention(plan, comm), scaled_attention(scaled, comm);
      attention.forward(tensors.views());
      if (comm.rank() != 1) {
        attention.forward(tensors.views());
      } else if (is_same_pass) {
        scaled_attention.forward(tensors.views());
      } else {
        refuse_call(plan, Pass::backward, comm, "a reason", {});
      }
    };
    try {
      LoopbackWorld(3).run(run);
      FAIL() << "accepted";
    } catch (const CommError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("ward of plan "), std::string::npos) << text;
      EXPECT_NE(text.find("is in another collective"), std::string::npos) << text;
    }
  }
}

TEST(RingRefusal, APlanOfAnotherRankIsRefused) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(2, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), 1 - comm.rank(), 2);
    RingAttention attention(plan, comm);
  });
  expect_all_name(texts, "rank");
}

TEST(RingRefusal, APlanOfAnotherSizeIsRefused) {
  const AttentionCase problem = usual_case();
  const auto texts = refusals(2, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(), 4);
    RingAttention attention(plan, comm);
  });
  expect_all_name(texts, "of 4");
}

TEST(BC_020, MalformedCuSeqlensAreRefusedOnEveryRank) {
  using Cu = std::vector<std::int64_t>;
  const auto told = [](const Cu& cu) {
    return refusals(4, [&](Communicator&) { batch_from_cu_seqlens(cu, cu, 12, 12); });
  };
  expect_all_name(told({1, 3}), "cu_seqlens_q[0]");
  expect_all_name(told({0, 5, 4}), "cu_seqlens_q[2]");
  expect_all_name(told({0, 3, 13}), "cu_seqlens_q[2]");
  for (const std::string& text : told({0, 3, 4, 12})) EXPECT_EQ(text, "");
}

}  // namespace
}  // namespace cpattn::testing
