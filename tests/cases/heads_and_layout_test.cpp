// K05 heads and dims, K06 strides and axis order, K08 lse.
#include <utility>
#include <vector>

#include "tests/cases/closed_form.h"
#include "tests/support/attend_backward.h"

namespace cpattn::testing {
namespace {

TEST(BC_021, NeighbouringQueryHeadsShareAKvHead) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch_of_one(4, 4), MaskKind::causal, dtype, 4, 2);
    problem.v.fill([](auto, std::int64_t h, auto) { return h == 0 ? 10.0f : 20.0f; });
    expect_everywhere(problem, [](std::int64_t i, std::int64_t h) {
      return RowAnswer{h < 2 ? 10.0 : 20.0, std::log(static_cast<double>(i + 1))};
    });
  }
}

TEST(BC_021, ARatioThatIsNotIntegralIsRefusedOnEveryRank) {
  const auto texts = refusals(4, [](Communicator& comm) {
    const Problem problem{.shape = make_shape(6, 4, 8, 8), .batch = batch_of_one(4, 4)};
    Plan(problem, test_config(MaskKind::causal, 1), default_kernels(), comm.rank(), comm.size());
  });
  for (const std::string& text : texts)
    EXPECT_NE(text.find("num_heads is 6, expected a multiple of num_kv_heads = 4"),
              std::string::npos)
        << text;
}

// The forward part: eight query heads, two kv heads.
TEST(BC_023, GroupedHeadsUnderACausalMask) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch_of_one(8, 8), MaskKind::causal, dtype, 8, 2);
    problem.q.fill([](auto...) { return 1.0f; });
    expect_everywhere(problem, [](std::int64_t i, auto) { return first_keys(i + 1); });
  }
}

// Heads are never split over ranks: a rank has all heads of its tokens. What remains of the case is
// the group mapping, and that nothing is kept from a call with other heads.
TEST(BC_024, HeadGroupsAfterACallWithOthers) {
  for (const auto& [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{28, 7}, {12, 4}}) {
    AttentionCase problem =
        u_recipe(batch_of_one(4, 4), MaskKind::full, DType::f32, heads, kv_heads);
    problem.v.fill([](auto, std::int64_t h, auto) { return static_cast<float>(h); });
    const std::int64_t group = heads / kv_heads;
    expect_everywhere(problem, [&](auto, std::int64_t h) {
      return RowAnswer{static_cast<double>(h / group), std::log(4.0)};
    });
  }
}

/// Views of q, k and v (thirds of the heads) in a fused buffer.
AnyConstTensor third_of(const HostTensor& fused, std::int64_t which, bool is_reversed) {
  AnyConstTensor view = fused.view();
  const std::int64_t heads = view.shape[1] / 3;
  view.shape[1] = heads;
  if (fused.tokens() > 0) view.data = view.row(0, which * heads + (is_reversed ? heads - 1 : 0));
  if (is_reversed) view.strides[1] = -view.strides[1];
  return view;
}

TEST(BC_025, FusedAndReversedViewsThroughTheRing) {
  HostTensor fused(DType::f32, {8, 6, 4});
  fused.fill_normal(0);
  for (const bool is_reversed : {false, true})
    for (const int world_size : {1, 2}) {
      AttentionCase problem =
          make_case(make_shape(2, 2, 4, 4), batch_of_one(8, 8), test_config(MaskKind::causal, 1));
      for (const auto& [tensor, which] :
           {std::pair{&problem.q, 0}, {&problem.k, 1}, {&problem.v, 2}})
        tensor->fill([&, third = which](std::int64_t t, std::int64_t h, std::int64_t d) {
          return fused.at(t, 2 * third + (is_reversed ? 1 - h : h), d);
        });
      const Attended copies = attend(problem, world_size);
      Attended views = unset_global_result(problem);
      LoopbackWorld(world_size).run([&](Communicator& comm) {
        const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                        comm.size());
        RankTensors rank(problem, plan.shard());
        const HostTensor own = fused.rows(global_rows(plan.shard().q));
        ForwardTensors tensors = rank.views();
        tensors.q = third_of(own, 0, is_reversed);
        tensors.k = third_of(own, 1, is_reversed);
        tensors.v = third_of(own, 2, is_reversed);
        RingAttention(plan, comm).forward(tensors);
        rank.scatter(plan.shard(), views);  // ranks own different rows
      });
      EXPECT_TRUE(bits_equal(views.out, copies.out)) << is_reversed << " CP" << world_size;
      EXPECT_TRUE(bits_equal(views.lse, copies.lse)) << is_reversed << " CP" << world_size;
    }
}

/// A writable third of a fused buffer.
AnyTensor third_of(HostTensor& fused, std::int64_t which, bool is_reversed) {
  const AnyConstTensor view = third_of(std::as_const(fused), which, is_reversed);
  return {const_cast<void*>(view.data), view.dtype, view.shape, view.strides};
}

// dq, dk and dv are written into thirds of one buffer, too.
TEST(BC_025, FusedAndReversedViewsThroughTheBackward) {
  HostTensor fused(DType::f32, {8, 6, 4});
  fused.fill_normal(0);
  for (const bool is_reversed : {false, true})
    for (const int world_size : {1, 2}) {
      AttentionCase problem =
          make_case(make_shape(2, 2, 4, 4), batch_of_one(8, 8), test_config(MaskKind::causal, 1));
      for (const auto& [tensor, which] :
           {std::pair{&problem.q, 0}, {&problem.k, 1}, {&problem.v, 2}})
        tensor->fill([&, third = which](std::int64_t t, std::int64_t h, std::int64_t d) {
          return fused.at(t, 2 * third + (is_reversed ? 1 - h : h), d);
        });
      const Upstream upstream = random_upstream(problem, 25);
      const Gradients copies = differentiate(problem, upstream, world_size);
      Gradients views{HostTensor(DType::f32, {8, 2, 4}), HostTensor(DType::f32, {8, 2, 4}),
                      HostTensor(DType::f32, {8, 2, 4})};
      LoopbackWorld(world_size).run([&](Communicator& comm) {
        const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                        comm.size());
        const GradientPlan gradient(plan);
        RankGradients rank(problem, upstream, plan.shard(), DType::f32);
        const HostTensor own = fused.rows(global_rows(plan.shard().q));
        HostTensor results(DType::f32, own.shape());
        RingAttention(plan, comm).forward(rank.forward.views());
        BackwardTensors tensors = rank.views();
        tensors.q = third_of(own, 0, is_reversed);
        tensors.k = third_of(own, 1, is_reversed);
        tensors.v = third_of(own, 2, is_reversed);
        tensors.dq = third_of(results, 0, is_reversed);
        tensors.dk = third_of(results, 1, is_reversed);
        tensors.dv = third_of(results, 2, is_reversed);
        RingGradient(plan, gradient, comm).backward(tensors);
        for (const auto& [tensor, third] : {std::pair{&rank.dq, 0}, {&rank.dk, 1}, {&rank.dv, 2}})
          tensor->fill([&, which = third](std::int64_t t, std::int64_t h, std::int64_t d) {
            return results.at(t, 2 * which + (is_reversed ? 1 - h : h), d);
          });
        rank.scatter(plan.shard(), views);  // ranks own different rows
      });
      EXPECT_TRUE(same(views, copies)) << is_reversed << " CP" << world_size;
    }
}

TEST(BC_025, AStrideInTheLastDimensionIsRefused) {
  const AttentionCase problem = u_recipe(batch_of_one(4, 4), MaskKind::causal, DType::f32);
  const auto texts = refusals(2, [&](Communicator& comm) {
    const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                    comm.size());
    RankTensors rank(problem, plan.shard());
    ForwardTensors tensors = rank.views();
    tensors.k.strides[2] = 2;
    RingAttention(plan, comm).forward(tensors);
  });
  for (const std::string& text : texts) EXPECT_NE(text.find("k:"), std::string::npos) << text;
}

TEST(BC_027, TokensBeforeHeads) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch_of_one(4, 4), MaskKind::causal, dtype, 4, 4);
    problem.v.fill(
        [](std::int64_t s, std::int64_t h, auto) { return static_cast<float>(10 * h + s); });
    expect_everywhere(problem, [](std::int64_t s, std::int64_t h) {
      return RowAnswer{10.0 * static_cast<double>(h) + static_cast<double>(s) / 2,
                       std::log(static_cast<double>(s + 1))};
    });
  }
}

// Chunks of 3072 keys: the prefix is rank 0's, the suffix of 64 keys rank 1's.
TEST(BC_034, PrefixAndSuffixMergeWithNaturalLogarithms) {
  for (const DType dtype : kAllDTypes) {
    AttentionCase problem = u_recipe(batch_of_one(1, 3136), MaskKind::full, dtype);
    problem.v.fill([](std::int64_t j, auto...) { return j < 3072 ? 0.0f : 1.0f; });
    problem.out_dtype = DType::f32;
    expect_everywhere(problem,
                      [](auto, auto) {
                        return RowAnswer{64.0 / 3136, std::log(3136.0)};
                      },
                      {.world_sizes = {1, 2, 4}, .chunk_sizes = {64, 512, 3072}});
  }
}

TEST(BC_034, OneKeyIsLseZeroAndEightAreLnEight) {
  for (const DType dtype : kAllDTypes) {
    expect_everywhere(u_recipe(batch_of_one(1, 1), MaskKind::full, dtype), [](auto, auto) {
      return RowAnswer{0.0, 0.0};
    });
    expect_everywhere(u_recipe(batch_of_one(1, 8), MaskKind::full, dtype), [](auto, auto) {
      return RowAnswer{3.5, 2.0794415416798357};
    });
  }
}

TEST(BC_036, RowsWithNothingToDoWriteTheirOwnLseOnly) {
  constexpr std::size_t kCanaries = 64;
  constexpr float kCanary = 12345.0f;
  const AttentionCase problem = u_recipe(pack({3, 2}, {0, 2}), MaskKind::causal, DType::f32, 2, 1);
  for (const int world_size : {1, 2, 4}) {
    Attended whole = unset_global_result(problem);
    LoopbackWorld(world_size).run([&](Communicator& comm) {
      const Plan plan(problem_of(problem), problem.config, default_kernels(), comm.rank(),
                      comm.size());
      RankTensors rank(problem, plan.shard());
      const std::size_t own = rank.lse.size();
      std::vector<float> guarded(own + 2 * kCanaries, kCanary);
      ForwardTensors tensors = rank.views();
      tensors.lse.data = guarded.data() + kCanaries;
      RingAttention(plan, comm).forward(tensors);
      for (std::size_t i = 0; i < guarded.size(); ++i) {
        if (i < kCanaries || i >= kCanaries + own) {
          EXPECT_EQ(guarded[i], kCanary) << i;
        } else {
          rank.lse[i - kCanaries] = guarded[i];
        }
      }
      rank.scatter(plan.shard(), whole);
    });
    expect_answer(problem, whole, [](std::int64_t row, auto) { return first_keys(row - 2); });
  }
}

}  // namespace
}  // namespace cpattn::testing
