// What the trainer's face promises, on any transport.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/src/comm_world.h"
#include "tests/support/batches.h"
#include "tests/support/one_layer.h"

namespace cpattn::testing {

using ContextParallel = CommTest;

inline OneLayer packed_layer(std::uint64_t seed = 1) {
  return OneLayer(make_random_case(make_shape(4, 2, 16, 12), pack({31, 0, 7, 64, 1}),
                                   test_config(MaskKind::causal, 8), DType::f32, seed),
                  seed);
}

/// The InvalidArgument that `body` ends in.
template <class Body>
std::string refusal(Body&& body) {
  return text_thrown_by<InvalidArgument>(std::forward<Body>(body));
}

TEST_P(ContextParallel, LayersOfAPlanHaveTheBitsOfOneRank) {
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    std::unique_ptr<PlannedAttention> planned;
    const auto group = borrowed(comm);
    {
      const ContextParallelAttention attention(group, layer.problem().config);
      planned = attention.plan(layer.stated());
    }  // the plan needs its group only
    for (int i = 0; i < 3; ++i) layer.run(*planned);
    EXPECT_EQ(group.use_count(), 2);
    planned.reset();
    EXPECT_EQ(group.use_count(), 1);
  });
}

TEST_P(ContextParallel, PlansOfOneGroupTakeTurns) {
  const OneLayer packed = packed_layer();
  const OneLayer full(make_random_case(make_shape(2, 2, 8, 8), batch_of_one(50, 90),
                                       test_config(MaskKind::full, 16), DType::bf16, 7),
                      7);
  run([&](Communicator& comm) {
    const ContextParallelAttention one(borrowed(comm), packed.problem().config);
    const ContextParallelAttention two(borrowed(comm), full.problem().config);
    const auto plan_one = one.plan(packed.stated()), plan_two = two.plan(full.stated());
    for (int i = 0; i < 2; ++i) {
      packed.run(*plan_one);
      full.run(*plan_two);
    }
  });
}

TEST_P(ContextParallel, AProblemThatOneRankCannotPlanIsRefusedOnAll) {
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    const ContextParallelAttention attention(borrowed(comm), layer.problem().config);
    Problem problem = layer.stated();
    const int culprit = comm.size() - 1;
    if (comm.rank() == culprit) {
      problem.shape.num_kv_heads = 3;
      problem.shape.head_dim = 0;
    }
    const std::string text = refusal([&] { attention.plan(problem); });
    EXPECT_EQ(text.find("rank " + std::to_string(culprit) + ": "), 0u) << text;
    EXPECT_NE(text.find("head_dim"), std::string::npos) << text;
    EXPECT_NE(text.find("num_kv_heads"), std::string::npos) << text;
    layer.run(*attention.plan(layer.stated()));  // nothing was lost
  });
}

TEST_P(ContextParallel, BadKnobsAreRefusedOnAll) {
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    CpConfig config = layer.problem().config;
    if (comm.rank() == 0) config.timeout_seconds = std::nan("");
    const ContextParallelAttention attention(borrowed(comm), config);
    const std::string text = refusal([&] { attention.plan(layer.stated()); });
    EXPECT_EQ(text.find("rank 0: timeout"), 0u) << text;
  });
}

TEST_P(ContextParallel, WhatDiffersIsNamedWithValuesAndRanks) {
  if (size() == 1) return;  // nobody to differ from
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    CpConfig config = layer.problem().config;
    Problem problem = layer.stated();
    if (comm.rank() == 1) {
      config.chunk_tokens = 16;
      problem.out_dtype = DType::bf16;
    }
    const ContextParallelAttention attention(borrowed(comm), config);
    const std::string text = refusal([&] { attention.plan(problem); });
    EXPECT_NE(text.find("chunk_tokens differs between ranks: "), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 has 16"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 has bf16"), std::string::npos) << text;
  });
}

TEST_P(ContextParallel, ADocumentThatDiffersIsNamedWithItsRows) {
  if (size() == 1) return;  // nobody to differ from
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    for (const int before : {0, 63, 64}) {  // 64 documents are told by their rows, the rest is not
      Problem problem = layer.stated();
      std::vector<std::int64_t> lengths(static_cast<std::size_t>(before) + 1, 0);
      lengths.push_back(comm.rank() == 1 ? 6 : 7);
      lengths.push_back(10);
      problem.batch = batch_from_cu_seqlens(lengths, lengths, 10, 10);
      const ContextParallelAttention attention(borrowed(comm), layer.problem().config);
      const std::string text = refusal([&] { attention.plan(problem); });
      if (before < 64) {
        const std::string name = "document " + std::to_string(before) + " differs between ranks: ";
        EXPECT_NE(text.find(name), std::string::npos) << text;
        EXPECT_NE(text.find("rank 1 has q rows [0, 6) kv rows [0, 6)"), std::string::npos) << text;
      } else {
        EXPECT_NE(text.find("documents_digest differs"), std::string::npos) << text;
      }
    }
  });
}

TEST_P(ContextParallel, ABindingCanRefuseForItsRank) {
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    const bool is_culprit = comm.rank() == comm.size() - 1;
    const ContextParallelAttention attention(borrowed(comm), layer.problem().config);
    const std::string why = "rank " + std::to_string(comm.size() - 1) + ": not a tensor";
    EXPECT_EQ(refusal([&] {
                is_culprit ? attention.refuse_plan("not a tensor")
                           : static_cast<void>(attention.plan(layer.stated()));
              }),
              why);
    const auto planned = attention.plan(layer.stated());
    RankTensors tensors(layer.problem(), planned->plan().shard());
    EXPECT_EQ(refusal([&] {
                is_culprit ? planned->refuse_forward("not a tensor")
                           : planned->forward(tensors.views());
              }),
              why);
    RankGradients gradients(layer.problem(), random_upstream(layer.problem(), 1),
                            planned->plan().shard(), DType::f32);
    for (int i = 0; i < 2; ++i) {  // the first backward agrees on its plan before
      EXPECT_EQ(refusal([&] {
                  is_culprit ? planned->refuse_backward("not a tensor")
                             : planned->backward(gradients.views());
                }),
                why);
    }
    layer.run(*planned);
  });
}

TEST_P(ContextParallel, ExplainsWhatRunsInTheNumbersOfThePlan) {
  const OneLayer layer = packed_layer();
  run([&](Communicator& comm) {
    const ContextParallelAttention attention(borrowed(comm), layer.problem().config);
    const Explanation told = attention.explain(layer.stated());  // not collective
    const auto planned = attention.plan(layer.stated());
    EXPECT_TRUE(told.is_supported);
    EXPECT_TRUE(told.refusals.empty());
    EXPECT_EQ(told.rank, comm.rank());
    EXPECT_EQ(told.world_size, comm.size());
    EXPECT_EQ(told.guarantee, "bitwise across CP sizes");
    EXPECT_EQ(told.transport, comm.transport());
    EXPECT_EQ(told.kernels, default_kernels().name);
    EXPECT_EQ(told.q_rows, planned->plan().shard().q_rows);
    EXPECT_EQ(told.visible_pairs, planned->plan().shard().visible_pairs);
    EXPECT_EQ(told.forward_bytes_on_wire, planned->plan().bytes_on_wire());
    EXPECT_EQ(told.backward_bytes_on_wire, planned->gradient_plan().bytes_on_wire());
    EXPECT_EQ(told.backward_memory_bytes, planned->gradient_plan().memory_bytes());
    EXPECT_GT(told.forward_memory_bytes, 0u);
  });
}

}  // namespace cpattn::testing
