// The whole product on the doubles of CUDA and NCCL, where they are made to dawdle, to lack memory
// or to be an older device. Executed on the CPU; says nothing of a GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "tests/cp/cuda/gpu_ranks.h"
#include "tests/support/cuda/fake_cuda.h"
#include "tests/support/races.h"

extern "C" cpattn::CudaBackend* cpattn_cuda_backend(std::uint32_t interface);

namespace cpattn::testing {

std::shared_ptr<CudaBackend> backend_under_test() {
  return std::shared_ptr<CudaBackend>(cpattn_cuda_backend(kCudaBackendInterface));
}

namespace {

class GpuRing : public ::testing::Test {
 protected:
  void SetUp() override { fake_cuda::reset(); }
  void TearDown() override {
    EXPECT_EQ(races_.num_unexpected(), 0);
    fake_cuda::reset();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live()) << "something was left behind";
  }

 private:
  RaceCount races_;
};

TEST_F(GpuRing, OlderGpusRunThePortableKernels) {
  fake_cuda::set_machine(
      {.compute_major = 8, .compute_minor = 0, .shared_bytes_per_block = 163 * 1024});
  const AttentionCase problem = small_case(DType::bf16, MaskKind::causal);
  const GpuResults alone = run_on_gpus(problem, 1, GpuExchangeKind::nccl);
  EXPECT_TRUE(same(run_on_gpus(problem, 3, GpuExchangeKind::nccl), alone));
}

// Streams that dawdle show a wait that is missing.
TEST_F(GpuRing, BitsDoNotDependOnWhenStreamsGetToTheirWork) {
  const AttentionCase problem = small_case(DType::bf16, MaskKind::full);
  const GpuResults alone = run_on_gpus(problem, 1, GpuExchangeKind::nccl);
  const std::uint64_t num_seeds = kFindsRaces ? 1 : 3;  // the sanitizer needs no luck
  for (std::uint64_t seed = 1; seed <= num_seeds; ++seed) {
    fake_cuda::set_delays(seed, 2000);
    EXPECT_TRUE(same(run_on_gpus(problem, 3, GpuExchangeKind::nccl, 2), alone));
    EXPECT_TRUE(same(run_on_gpus(problem, 2, GpuExchangeKind::host, 2), alone));
  }
}

// Where lse is the C library's, which takes its logarithm on the doubles.
TEST_F(GpuRing, F32GradientsHaveTheBitsOfTheCpu) {
  for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag}) {
    AttentionCase problem = small_case(DType::f32, MaskKind::causal);
    problem.config.sharding = sharding;

    const GpuResults gpu = run_on_gpus(problem, 3, GpuExchangeKind::nccl);

    const Attended cpu = attend(problem, 3);
    EXPECT_TRUE(bits_equal(gpu.forward.out, cpu.out));
    EXPECT_TRUE(bits_equal(gpu.forward.lse, cpu.lse));
    EXPECT_TRUE(same(gpu.gradients, differentiate(problem, random_upstream(problem, 3), 3)));
  }
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
      plan->backward(tensors.backward_views(), rank.queue());
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

// More documents than a launch has blocks in its second and third dimension. What is computed of so
// many is in gpu_device_test, as far as there is a device to do it.
TEST_F(GpuRing, BC_081_NoLaunchHasADimensionForDocuments) {
  // The thread sanitizer, to which this shows nothing, would need more memory than there is.
  constexpr std::size_t kNumDocuments = kFindsRaces ? 100 : 70'000;
  fake_cuda::set_kernel_options({.only_checks = true});
  const SequenceBatch batch = pack(std::vector<std::int64_t>(kNumDocuments, 1));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const AttentionCase problem = make_random_case(make_shape(1, 1, 8, 8), batch,
                                                   test_config(MaskKind::causal, 512), dtype, 81);
    const std::uint64_t before = fake_cuda::num_calls("cudaLaunchKernelEx");
    for (const int world_size : {1, 2})
      EXPECT_NO_THROW(run_on_gpus(problem, world_size, GpuExchangeKind::nccl)) << name_of(dtype);
    EXPECT_GT(fake_cuda::num_calls("cudaLaunchKernelEx"), before);
  }
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
          fake_cuda::fail_after("cudaMalloc", failing, cudaErrorMemoryAllocation, 0);
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
