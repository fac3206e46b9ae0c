// The whole product on the doubles of CUDA and NCCL: kernels, exchanges, streams, graphs. Executed
// on the CPU; says nothing of a GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <utility>

#include "cp/shard_rows.h"
#include "cp/shard_tools.h"
#include "tests/cp/cuda/gpu_ranks.h"
#include "tests/support/batches.h"
#include "tests/support/cuda/fake_cuda.h"

namespace cpattn::testing {
namespace {

AttentionCase small_case(DType dtype, MaskKind mask, std::uint64_t seed = 1) {
  return make_random_case(make_shape(2, 1, 16, 16), pack({70, 0, 41}), test_config(mask, 16), dtype,
                          seed);
}

/// Forward and backward on `world_size` ranks, `repeats` times.
GpuResults run(const AttentionCase& problem, int world_size, GpuExchangeKind exchange,
               int repeats = 1) {
  const Upstream upstream = random_upstream(problem, 3);
  GpuResults whole = empty_results(problem);
  std::mutex mutex;
  on_gpu_ranks(world_size, exchange, [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                          .plan(problem_of(problem));
    GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
    for (int i = 0; i < repeats; ++i) {
      plan->forward(tensors.forward_views(), rank.queue());
      if (rank.has_backward(problem.dtype)) plan->backward(tensors.backward_views(), rank.queue());
    }
    rank.finish();
    tensors.fetch();
    const std::lock_guard lock(mutex);
    collect(tensors, plan->plan().shard(), whole);
  });
  return whole;
}

class GpuRing : public ::testing::Test {
 protected:
  void SetUp() override { fake_cuda::reset(); }
  void TearDown() override {
    fake_cuda::reset();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live()) << "something was left behind";
  }
};

TEST_F(GpuRing, BitsDoNotDependOnTheNumberOfRanks) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag}) {
      AttentionCase problem = small_case(dtype, MaskKind::causal);
      problem.config.sharding = sharding;
      const GpuResults alone = run(problem, 1, GpuExchangeKind::nccl);
      for (const int world_size : {2, 3, 4, 8}) {
        SCOPED_TRACE(world_size);
        EXPECT_TRUE(same(run(problem, world_size, GpuExchangeKind::nccl, 2), alone));
      }
      EXPECT_TRUE(same(run(problem, 3, GpuExchangeKind::host, 2), alone));
    }
  }
}

TEST_F(GpuRing, OlderGpusRunThePortableKernels) {
  fake_cuda::set_machine(
      {.compute_major = 8, .compute_minor = 0, .shared_bytes_per_block = 163 * 1024});
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const GpuResults alone = run(problem, 1, GpuExchangeKind::nccl);
  EXPECT_TRUE(same(run(problem, 3, GpuExchangeKind::nccl), alone));
}

// Streams that dawdle show a wait that is missing.
TEST_F(GpuRing, BitsDoNotDependOnWhenStreamsGetToTheirWork) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::full);
  const GpuResults alone = run(problem, 1, GpuExchangeKind::nccl);
  for (const std::uint64_t seed : {1, 2, 3}) {
    fake_cuda::set_delays(seed, 2000);
    EXPECT_TRUE(same(run(problem, 3, GpuExchangeKind::nccl, 2), alone));
    EXPECT_TRUE(same(run(problem, 2, GpuExchangeKind::host, 2), alone));
  }
}

// f32 is the CPU's arithmetic, to the bit.
TEST_F(GpuRing, F32HasTheBitsOfTheCpu) {
  const AttentionCase problem = small_case(DType::f32, MaskKind::causal);
  const Attended cpu = attend(problem, 2);

  const GpuResults gpu = run(problem, 2, GpuExchangeKind::nccl);

  EXPECT_TRUE(bits_equal(gpu.forward.out, cpu.out));
  EXPECT_TRUE(bits_equal(gpu.forward.lse, cpu.lse));
}

TEST_F(GpuRing, NothingIsAllocatedAfterTheFirstCall) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const Upstream upstream = random_upstream(problem, 3);
  on_gpu_ranks(2, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                          .plan(problem_of(problem));
    const GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
    const auto step = [&] {
      plan->forward(tensors.forward_views(), rank.queue());
      if (rank.has_backward(problem.dtype)) plan->backward(tensors.backward_views(), rank.queue());
      rank.finish();
      rank.comm.barrier(deadline_after(Seconds(60)), "a step");
    };
    step();
    const fake_cuda::Live before = fake_cuda::live();
    rank.comm.barrier(deadline_after(Seconds(60)), "counted");
    for (int i = 0; i < 3; ++i) step();
    // Events are pooled: as many as hops were ever under way at a time.
    EXPECT_EQ(fake_cuda::live().device_allocations, before.device_allocations);
    EXPECT_EQ(fake_cuda::live().host_allocations, before.host_allocations);
    EXPECT_EQ(fake_cuda::live().streams, before.streams);
    rank.comm.barrier(deadline_after(Seconds(60)), "compared");
  });
}

// As a trainer lives it: three optimizer steps of several micro-batches; in each step the largest
// logits accumulate over the micro-batches, are read, and are reset in place. Eagerly, and by a
// graph that was captured after a warm-up; the first step must be as complete as the others.
std::vector<GpuResults> train(const AttentionCase& first, int world_size, bool is_replayed) {
  constexpr int kSteps = 3, kMicroBatches = 3;
  const Upstream upstream = random_upstream(first, 3);
  std::vector<GpuResults> steps(kSteps, empty_results(first));
  std::mutex mutex;
  on_gpu_ranks(world_size, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, first.config, &rank.kernels())
                          .plan(problem_of(first));
    if (rank.has_backward(first.dtype)) plan->prepare_backward();
    const Shard& shard = plan->plan().shard();
    GpuTensors tensors(first, upstream, shard, *rank.device);
    const auto work = [&] {
      plan->forward(tensors.forward_views(), rank.queue());
      if (rank.has_backward(first.dtype)) plan->backward(tensors.backward_views(), rank.queue());
    };
    const auto reset_maxima = [&] {
      std::fill(tensors.maxima.begin(), tensors.maxima.end(), -kInf);
      tensors.head_maxima.put();
    };
    std::unique_ptr<OwnedGraph> graph;
    if (is_replayed) {
      work();  // warm-up
      rank.finish();
      graph = rank.backend->capture(rank.device, rank.queue(), work);
      reset_maxima();
    }
    tensors.fetch();
    EXPECT_EQ(tensors.maxima, std::vector<float>(tensors.maxima.size(), -kInf))
        << "nothing observed yet";
    for (int step = 0; step < kSteps; ++step) {
      for (int batch = 0; batch < kMicroBatches; ++batch) {
        const AttentionCase now = small_case(first.dtype, first.config.mask,
                                             static_cast<std::uint64_t>(10 + 5 * step + batch));
        const RankTensors inputs(now, shard);
        tensors.host.forward.q = inputs.q;
        tensors.host.forward.k = inputs.k;
        tensors.host.forward.v = inputs.v;
        for (Mirrored* input : {&tensors.q, &tensors.k, &tensors.v}) input->put();
        if (graph) {
          graph->replay(rank.queue());
        } else {
          work();
        }
        rank.finish();
      }
      tensors.fetch();
      {
        const std::lock_guard lock(mutex);
        collect(tensors, shard, steps[static_cast<std::size_t>(step)]);
      }
      reset_maxima();
    }
  });
  return steps;
}

TEST_F(GpuRing, StepsReplayedFromAGraphAreThoseRunEagerly) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const std::vector<GpuResults> alone = train(problem, 1, false);
  for (const int world_size : {1, 2, 3}) {
    const std::vector<GpuResults> eager = train(problem, world_size, false);
    const std::vector<GpuResults> replayed = train(problem, world_size, true);
    for (std::size_t step = 0; step < alone.size(); ++step) {
      SCOPED_TRACE(cpattn::detail::concat("ranks ", world_size, ", step ", step));
      EXPECT_TRUE(same(eager[step], alone[step]));
      EXPECT_TRUE(same(replayed[step], alone[step]));
      EXPECT_TRUE(std::isfinite(replayed[step].maxima[0]));
    }
  }
}

TEST_F(GpuRing, WhatCannotBeCapturedIsRefusedBeforeItIs) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const Upstream upstream = random_upstream(problem, 3);
  for (const GpuExchangeKind exchange : {GpuExchangeKind::nccl, GpuExchangeKind::host}) {
    on_gpu_ranks(2, exchange, [&](GpuRank& rank) {
      const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                            .plan(problem_of(problem));
      const GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
      auto* const queue = static_cast<cudaStream_t>(rank.queue().handle);
      ASSERT_EQ(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      std::string text;
      try {
        if (exchange == GpuExchangeKind::nccl) {
          plan->backward(tensors.backward_views(), rank.queue());
        } else {
          plan->forward(tensors.forward_views(), rank.queue());
        }
      } catch (const InvalidArgument& error) {
        text = error.what();
      }
      EXPECT_NE(text.find("stream: in capture, expected none"), std::string::npos) << text;
      cudaGraph_t graph = nullptr;
      EXPECT_EQ(cudaStreamEndCapture(queue, &graph), cudaSuccess) << "the capture was not harmed";
      EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      rank.comm.barrier(deadline_after(Seconds(60)), "both were refused");
    });
  }
}

TEST_F(GpuRing, TensorsThatAreNotOnTheDeviceAreRefusedOnEveryRank) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const Upstream upstream = random_upstream(problem, 3);
  on_gpu_ranks(2, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                          .plan(problem_of(problem));
    GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
    ForwardTensors views = tensors.forward_views();
    if (rank.comm.rank() == 1) views.q.data = tensors.host.forward.q.view().data;
    std::string text;
    try {
      plan->forward(views, rank.queue());
    } catch (const InvalidArgument& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("rank 1: q: "), std::string::npos) << text;
    EXPECT_NE(text.find("host memory"), std::string::npos) << text;
    plan->forward(tensors.forward_views(), rank.queue());
    rank.finish();
  });
}

TEST_F(GpuRing, KernelsOfTheCpuAreRefusedForShardsOnAGpu) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  on_gpu_ranks(2, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    EXPECT_THROW(ContextParallelAttention(rank.transport, problem.config).plan(problem_of(problem)),
                 InvalidArgument);
  });
}

TEST_F(GpuRing, ShardsAreGatheredAndScatteredOnTheDevice) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  on_gpu_ranks(3, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    const Plan plan(problem_of(problem), problem.config, rank.kernels(), rank.comm.rank(), 3);
    const auto& chunks = plan.shard().q;
    HostTensor whole = problem.q, back(whole.dtype(), whole.shape());
    HostTensor expected(whole.dtype(), {num_rows(chunks), whole.shape()[1], whole.shape()[2]});
    shard_rows(whole.view(), chunks, expected.view());
    HostTensor local(expected.dtype(), expected.shape());
    HostTensor expected_back = back;
    unshard_rows(std::as_const(expected).view(), chunks, expected_back.view());

    Mirrored there(*rank.device, whole), part(*rank.device, local), again(*rank.device, back);
    const ShardRows rows(chunks, rank.kernels(), *rank.device);
    const auto work = [&] {
      rows.shard(there.view(), part.view(), rank.queue());
      rows.unshard(part.view(), again.view(), rank.queue());
    };
    work();
    rank.finish();
    part.fetch();
    again.fetch();
    EXPECT_TRUE(bits_equal(local, expected));
    EXPECT_TRUE(bits_equal(back, expected_back));

    const auto graph = rank.backend->capture(rank.device, rank.queue(), work);
    HostTensor zeros(local.dtype(), local.shape());
    zeros.fill([](auto...) { return 0.0f; });
    local = zeros;
    part.put();
    graph->replay(rank.queue());
    rank.finish();
    part.fetch();
    EXPECT_TRUE(bits_equal(local, expected));

    try {
      rows.shard(whole.view(), part.view(), rank.queue());
      ADD_FAILURE() << "host memory was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("global: "), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("host memory"), std::string::npos) << error.what();
    }
  });
}

// A capture that fails leaves the stream as it was, and nothing behind.
TEST_F(GpuRing, ACaptureThatFailsDoesNothing) {
  on_gpu_ranks(1, GpuExchangeKind::nccl, [&](GpuRank& rank) {
    const Buffer memory = rank.device->allocate(64);
    const auto refused = [&](const std::function<void()>& work) {
      EXPECT_THROW(rank.backend->capture(rank.device, rank.queue(), work), Error);
      EXPECT_FALSE(rank.device->is_capturing(rank.queue()));
      rank.finish();
    };
    refused([] { throw InvalidArgument("of the caller's"); });
    refused([&] { rank.finish(); });  // waits inside
    const std::vector<std::byte> ones(64, std::byte{1});
    std::vector<std::byte> seen(64);
    rank.device->upload(memory.data(), ones);
    rank.device->download(seen, memory.data());
    EXPECT_EQ(seen, ones);
  });
}

// f32 has the same numerics on both, and messages would carry the bytes, but not in one form.
TEST_F(GpuRing, RanksOnACpuAndOnAGpuAreRefusedInOneRing) {
  const AttentionCase problem = small_case(DType::f32, MaskKind::causal);
  on_gpu_ranks(2, GpuExchangeKind::host, [&](GpuRank& rank) {
    ASSERT_EQ(rank.kernels().numerics(DType::f32), default_kernels().numerics(DType::f32));
    const bool is_on_gpu = rank.comm.rank() == 0;
    ShardTransport& transport = is_on_gpu ? *rank.transport : rank.comm;
    const Plan plan(problem_of(problem), problem.config,
                    is_on_gpu ? rank.kernels() : default_kernels(), rank.comm.rank(), 2);
    std::string text;
    try {
      RingAttention attention(plan, transport);
    } catch (const InvalidArgument& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("device"), std::string::npos) << text;
    EXPECT_NE(text.find("cuda"), std::string::npos) << text;
    EXPECT_NE(text.find("cpu"), std::string::npos) << text;
  });
}

// Whatever cannot be had while a plan is made on one rank: that rank says so, the other one ends by
// its deadline, nothing is left behind.
TEST_F(GpuRing, MemoryThatCannotBeHadEndsTheJobAndLeavesNothing) {
  AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  problem.config.timeout_seconds = 1.0;
  const Upstream upstream = random_upstream(problem, 3);
  for (int failing = 1; failing <= 8; ++failing) {
    SCOPED_TRACE(failing);
    bool has_failed = false;
    try {
      on_gpu_ranks(2, GpuExchangeKind::nccl, [&](GpuRank& rank) {
        if (rank.comm.rank() == 0)
          fake_cuda::fail_after("cudaMallocAsync", failing, cudaErrorMemoryAllocation, 0);
        rank.comm.barrier(deadline_after(Seconds(60)), "planted");
        const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                              .plan(problem_of(problem));
        const GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
        plan->forward(tensors.forward_views(), rank.queue());
        rank.finish();
      });
    } catch (const Error&) {
      has_failed = true;
    }
    EXPECT_TRUE(has_failed);
    fake_cuda::reset();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live());
  }
}

}  // namespace
}  // namespace cpattn::testing
