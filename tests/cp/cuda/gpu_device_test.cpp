// The whole product on the GPUs of a backend: kernels, exchanges, streams, graphs. The backend is
// the shared object that CPATTN_TEST_CUDA_BACKEND names: the real one, or that of the doubles,
// which executes everything on the CPU and says nothing of a GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <utility>

#include "cp/gpu_group.h"
#include "cp/shard_rows.h"
#include "cp/shard_tools.h"
#include "tests/cp/cuda/gpu_ranks.h"

namespace cpattn::testing {

namespace {

std::string backend_path() {
  const char* path = std::getenv("CPATTN_TEST_CUDA_BACKEND");
  return path == nullptr ? "" : path;
}

}  // namespace

std::shared_ptr<CudaBackend> backend_under_test() {
  static const std::shared_ptr<CudaBackend> backend = [] {
    return CudaBackend::open(backend_path());
  }();
  return backend;
}

namespace {

TEST(GpuDevice, BitsDoNotDependOnTheNumberOfRanks) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag}) {
      AttentionCase problem = small_case(dtype, MaskKind::causal);
      problem.config.sharding = sharding;
      const GpuResults alone = run_on_gpus(problem, 1, GpuExchangeKind::nccl);
      for (const int world_size : {2, 3, 4, 8}) {
        SCOPED_TRACE(world_size);
        EXPECT_TRUE(same(run_on_gpus(problem, world_size, nccl_if_possible(world_size), 2), alone));
      }
      EXPECT_TRUE(same(run_on_gpus(problem, 3, GpuExchangeKind::host, 2), alone));
    }
  }
}

// Little enough for compute-sanitizer, and messages only, which it has nothing to say about.
TEST(GpuDevice, EveryTypeOnOneRankAndOnTwo) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const AttentionCase problem = small_case(dtype, MaskKind::causal);
    const GpuResults alone = run_on_gpus(problem, 1, GpuExchangeKind::host);
    EXPECT_TRUE(same(run_on_gpus(problem, 2, GpuExchangeKind::host), alone)) << name_of(dtype);
  }
}

// f32 is the CPU's arithmetic, to the bit.
TEST(GpuDevice, F32HasTheBitsOfTheCpu) {
  const AttentionCase problem = small_case(DType::f32, MaskKind::causal);
  const Attended cpu = attend(problem, 2);

  const GpuResults gpu = run_on_gpus(problem, 2, nccl_if_possible(2));

  EXPECT_TRUE(bits_equal(gpu.forward.out, cpu.out));
  // Its logarithm is the device's own, which may round otherwise, by a unit in the last place (CUDA
  // C++ Programming Guide).
  for (std::size_t i = 0; i < cpu.lse.size(); ++i) {
    EXPECT_TRUE(gpu.forward.lse[i] == cpu.lse[i] ||
                gpu.forward.lse[i] == std::nextafter(cpu.lse[i], gpu.forward.lse[i]));
  }
  if (gpu.forward.lse != cpu.lse) return;  // what gradients are made of
  EXPECT_TRUE(same(gpu.gradients, differentiate(problem, random_upstream(problem, 3), 2)));
}

// As a trainer lives it: three optimizer steps of several micro-batches; in each step the largest
// logits accumulate over the micro-batches, are read, and are reset in place. Eagerly, and by a
// graph that was captured after a warm-up; the first step must be as complete as the others.
std::vector<GpuResults> train(const AttentionCase& first, int world_size, bool is_replayed) {
  constexpr int kSteps = 3, kMicroBatches = 2;
  const Upstream upstream = random_upstream(first, 3);
  std::vector<GpuResults> steps(kSteps, empty_results(first));
  std::mutex mutex;
  on_gpu_ranks(world_size, nccl_if_possible(world_size), [&](GpuRank& rank) {
    const auto plan = ContextParallelAttention(rank.transport, first.config, &rank.kernels())
                          .plan(problem_of(first));
    plan->prepare_backward();
    const Shard& shard = plan->plan().shard();
    GpuTensors tensors(first, upstream, shard, *rank.device);
    const auto work = [&] {
      plan->forward(tensors.forward_views(), rank.queue());
      plan->backward(tensors.backward_views(), rank.queue());
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

TEST(GpuDevice, StepsReplayedFromAGraphAreThoseRunEagerly) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    AttentionCase problem = small_case(dtype, MaskKind::causal);
    // A pair of chunks costs the f32 kernels whole tiles, however few rows it has: on the doubles
    // larger chunks, of which each document still has several, take a quarter of the time.
    if (dtype == DType::f32) problem.config.chunk_tokens = 32;
    const std::vector<GpuResults> alone = train(problem, 1, false);
    for (const int world_size : {1, 2, 3}) {
      const std::vector<GpuResults> eager =
          world_size == 1 ? alone : train(problem, world_size, false);
      const bool is_replayed = nccl_if_possible(world_size) == GpuExchangeKind::nccl;
      const std::vector<GpuResults> replayed = train(problem, world_size, is_replayed);
      for (std::size_t step = 0; step < alone.size(); ++step) {
        SCOPED_TRACE(
            cpattn::detail::concat(name_of(dtype), ", ranks ", world_size, ", step ", step));
        EXPECT_TRUE(same(eager[step], alone[step]));
        EXPECT_TRUE(same(replayed[step], alone[step]));
        EXPECT_TRUE(std::isfinite(replayed[step].maxima[0]));
      }
    }
  }
}

TEST(GpuDevice, WhatCannotBeCapturedIsRefusedBeforeItIs) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const Upstream upstream = random_upstream(problem, 3);
  for (const GpuExchangeKind exchange : {GpuExchangeKind::nccl, GpuExchangeKind::host}) {
    const int world_size = exchange == nccl_if_possible(2) ? 2 : 1;
    on_gpu_ranks(world_size, exchange, [&](GpuRank& rank) {
      const auto plan = ContextParallelAttention(rank.transport, problem.config, &rank.kernels())
                            .plan(problem_of(problem));
      const GpuTensors tensors(problem, upstream, plan->plan().shard(), *rank.device);
      std::string text;
      const auto graph = rank.backend->capture(rank.device, rank.queue(), [&] {
        try {
          if (exchange == GpuExchangeKind::nccl) {
            plan->backward(tensors.backward_views(), rank.queue());
          } else {
            plan->forward(tensors.forward_views(), rank.queue());
          }
        } catch (const InvalidArgument& error) {
          text = error.what();
        }
      });
      EXPECT_NE(text.find("stream: in capture, expected none"), std::string::npos) << text;
      graph->replay(rank.queue());  // of nothing: the capture was not harmed
      rank.finish();
      rank.comm.barrier(deadline_after(Seconds(60)), "both were refused");
    });
  }
}

TEST(GpuDevice, TensorsThatAreNotOnTheDeviceAreRefusedOnEveryRank) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const Upstream upstream = random_upstream(problem, 3);
  on_gpu_ranks(2, nccl_if_possible(2), [&](GpuRank& rank) {
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

TEST(GpuDevice, KernelsOfTheCpuAreRefusedForShardsOnAGpu) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  on_gpu_ranks(2, nccl_if_possible(2), [&](GpuRank& rank) {
    EXPECT_THROW(ContextParallelAttention(rank.transport, problem.config).plan(problem_of(problem)),
                 InvalidArgument);
  });
}

TEST(GpuDevice, ShardsAreGatheredAndScatteredOnTheDevice) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  on_gpu_ranks(3, nccl_if_possible(3), [&](GpuRank& rank) {
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

/// Memory of a device, counted as it is asked for.
struct Counted {
  std::shared_ptr<Device> device;
  std::vector<Buffer> buffers;
  std::size_t size_bytes = 0;

  static void* allocate(void* context, std::size_t size_bytes, Stream) {
    auto& self = *static_cast<Counted*>(context);
    self.buffers.push_back(self.device->allocate(size_bytes));
    self.size_bytes += size_bytes;
    return self.buffers.back().data();
  }
  static void free(void*, void*) noexcept {}
};

// What `cpattn plan --device cuda` prints, on a machine without a GPU too, is what a group takes.
TEST(GpuDevice, PlansTakeTheMemoryThatTheyAccountFor) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const AttentionCase problem = small_case(dtype, MaskKind::causal);
    on_gpu_ranks(3, GpuExchangeKind::host, [&](GpuRank& rank) {
      Counted counted{rank.device, {}, 0};
      const CudaDeviceFacts facts = rank.backend->devices().front();
      const KernelTable kernels = rank.backend->kernels_for_plans(
          10 * facts.compute_major + facts.compute_minor, facts.multiprocessors);
      const Plan planned(problem_of(problem), problem.config, kernels, rank.comm.rank(), 3);
      const std::size_t forward = planned.memory().own(),
                        backward = GradientPlan(planned).memory_bytes();
      const auto group =
          GpuGroup::make(std::shared_ptr<Communicator>(std::shared_ptr<void>(), &rank.comm),
                         {.device = facts.ordinal,
                          .exchange = GpuExchange::host,
                          .backend = backend_path(),
                          .allocator = {Counted::allocate, Counted::free, &counted}});
      {
        const auto plan = ContextParallelAttention(group, problem.config, &group->kernels())
                              .plan(problem_of(problem));
        EXPECT_EQ(counted.size_bytes, forward) << name_of(dtype);
        plan->prepare_backward();
        EXPECT_EQ(counted.size_bytes, forward + backward) << name_of(dtype);
      }
    });
  }
}

// A capture that fails leaves the stream as it was, and nothing behind.
TEST(GpuDevice, ACaptureThatFailsDoesNothing) {
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

// Documents of one token: out is v. As many as the report says on a GPU; the doubles would take
// minutes for them.
TEST(GpuDevice, BC_081_ManyDocumentsOfOneToken) {
  const bool is_double = backend_under_test()->description().starts_with("doubles");
  const SequenceBatch batch = pack(std::vector<std::int64_t>(is_double ? 200 : 70'000, 1));
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const AttentionCase problem = make_random_case(make_shape(1, 1, 8, 8), batch,
                                                   test_config(MaskKind::causal, 512), dtype, 81);
    for (const int world_size : {1, 2}) {
      const GpuResults gpu = run_on_gpus(problem, world_size, nccl_if_possible(world_size));
      EXPECT_TRUE(bits_equal(gpu.forward.out, problem.v)) << name_of(dtype);
    }
  }
}

// f32 has the same numerics on both, and messages would carry the bytes, but not in one form.
TEST(GpuDevice, RanksOnACpuAndOnAGpuAreRefusedInOneRing) {
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

}  // namespace
}  // namespace cpattn::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::string refusal = cpattn::testing::backend_under_test()->refusal();
  if (!refusal.empty()) {
    std::cout << "not run: " << refusal << '\n';
    constexpr int kSkipped = 77;
    return kSkipped;
  }
  std::cout << "on " << cpattn::testing::backend_under_test()->description() << '\n';
  return RUN_ALL_TESTS();
}
