// The double of the runtime: kinds of memory, copies between them, and what the sanitizers see.
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/src/cuda/double_test.h"

namespace cpattn::fake_cuda {
namespace {

constexpr std::size_t kBytes = 64;

class Memory : public DoubleTest {
 protected:
  cudaPointerAttributes attributes_of(const void* pointer) {
    cudaPointerAttributes attributes{};
    EXPECT_EQ(cudaPointerGetAttributes(&attributes, pointer), cudaSuccess);
    return attributes;
  }
};

TEST_F(Memory, KnowsItsKindAndDevice) {
  std::vector<char> pageable(kBytes), registered(kBytes);
  void *pinned = nullptr, *mapped = nullptr;
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  char* device = device_memory<char>(kBytes);
  ASSERT_EQ(cudaMallocHost(&pinned, kBytes), cudaSuccess);
  ASSERT_EQ(cudaHostAlloc(&mapped, kBytes, cudaHostAllocPortable), cudaSuccess);
  ASSERT_EQ(cudaHostRegister(registered.data(), kBytes, 0), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);

  EXPECT_EQ(attributes_of(device + kBytes - 1).type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes_of(device).device, 2);
  EXPECT_EQ(attributes_of(device).hostPointer, nullptr);
  EXPECT_EQ(attributes_of(device + kBytes).type, cudaMemoryTypeUnregistered);
  for (const void* host : {pinned, mapped, static_cast<void*>(registered.data())}) {
    EXPECT_EQ(attributes_of(host).type, cudaMemoryTypeHost);
    EXPECT_EQ(attributes_of(host).hostPointer, host);
  }
  EXPECT_EQ(attributes_of(pageable.data()).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(live().host_allocations, 3);
  EXPECT_EQ(cudaHostRegister(registered.data() + 1, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostUnregister(registered.data()), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(registered.data()), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(attributes_of(registered.data()).type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaFree(pinned), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(mapped), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(mapped), cudaErrorInvalidValue);
}

TEST_F(Memory, BeginsAsNaN) {
  float values[4] = {};
  ASSERT_EQ(cudaMemcpy(values, device_memory<float>(4), sizeof(values), cudaMemcpyDefault),
            cudaSuccess);
  for (const float value : values) EXPECT_TRUE(std::isnan(value));
}

TEST_F(Memory, IsGoneWhenItIsFreed) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  EXPECT_EQ(live().device_allocations, 1);
  EXPECT_EQ(cudaFree(static_cast<char*>(memory) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 0), cudaSuccess);
  EXPECT_EQ(memory, nullptr);
}

TEST_F(Memory, RunsOut) {
  set_machine({.memory_bytes = 2 * kBytes});
  std::size_t free_bytes = 0, total_bytes = 0;
  void* memory = nullptr;
  device_memory<char>(kBytes);
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  EXPECT_EQ(free_bytes, kBytes);
  EXPECT_EQ(total_bytes, 2 * kBytes);

  EXPECT_EQ(cudaMalloc(&memory, kBytes + 1), cudaErrorMemoryAllocation);

  EXPECT_EQ(memory, nullptr);
  device_memory<char>(kBytes);
}

TEST_F(Memory, CopiesGoTheWayTheySay) {
  std::vector<char> host(kBytes), more(kBytes);
  char *device = device_memory<char>(kBytes), *other = device_memory<char>(kBytes);
  const auto copy = [](void* to, const void* from, cudaMemcpyKind kind) {
    return cudaMemcpy(to, from, kBytes, kind);
  };
  struct Way {
    void* to;
    const void* from;
    cudaMemcpyKind kind;
  };
  const Way kWays[] = {{device, host.data(), cudaMemcpyHostToDevice},
                       {host.data(), device, cudaMemcpyDeviceToHost},
                       {device, other, cudaMemcpyDeviceToDevice},
                       {host.data(), more.data(), cudaMemcpyHostToHost}};
  for (const Way& way : kWays) {
    for (const Way& other_way : kWays) {
      EXPECT_EQ(copy(way.to, way.from, other_way.kind),
                way.kind == other_way.kind ? cudaSuccess : cudaErrorInvalidValue);
    }
    EXPECT_EQ(copy(way.to, way.from, cudaMemcpyDefault), cudaSuccess);
  }
  EXPECT_EQ(cudaMemset(host.data(), 0, kBytes), cudaErrorInvalidValue);
}

TEST_F(Memory, CopiesStayInsideOfAllocations) {
  cudaStream_t work = stream();
  std::vector<char> host(2 * kBytes);
  char* device = device_memory<char>(kBytes);
  EXPECT_EQ(cudaMemcpy(device, host.data(), kBytes + 1, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), device + 1, kBytes, cudaMemcpyDeviceToHost, work),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(device + 1, 0, kBytes, work), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy2D(device, 16, host.data(), 32, 16, 4, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy2D(device, 17, host.data(), 32, 16, 4, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy2D(device, 8, host.data(), 32, 16, 4, cudaMemcpyHostToDevice),
            cudaErrorInvalidPitchValue);
}

TEST_F(Memory, CopiesOfRowsLeaveTheGapsAlone) {
  cudaStream_t work = stream();
  constexpr std::size_t kRows = 3, kWidth = 4, kPitch = 6;
  char* device = device_memory<char>(kRows * kPitch);
  ASSERT_EQ(cudaMemset(device, 'x', kRows * kPitch), cudaSuccess);
  const std::string rows = "abcdefghijkl";

  ASSERT_EQ(cudaMemcpy2DAsync(device, kPitch, rows.data(), kWidth, kWidth, kRows,
                              cudaMemcpyHostToDevice, work),
            cudaSuccess);

  std::string result(kRows * kPitch, '?');
  ASSERT_EQ(cudaMemcpyAsync(result.data(), device, result.size(), cudaMemcpyDeviceToHost, work),
            cudaSuccess);
  EXPECT_EQ(result, "abcdxxefghxxijklxx");
}

TEST_F(Memory, PageableSourcesAreReadAtOnceAndPinnedOnesLater) {
  cudaStream_t work = stream();
  char* device = device_memory<char>(2);
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, 1), cudaSuccess);
  char pageable = 'a';
  std::memset(pinned, 'a', 1);
  std::atomic<bool> may_go{false};
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  ASSERT_EQ(cudaMemcpyAsync(device, &pageable, 1, cudaMemcpyHostToDevice, work), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(device + 1, pinned, 1, cudaMemcpyHostToDevice, work), cudaSuccess);
  EXPECT_EQ(num_pageable_copies(), 1u);

  pageable = 'b';
  std::memset(pinned, 'b', 1);
  may_go.store(true);

  std::string result(2, '?');
  ASSERT_EQ(cudaMemcpyAsync(result.data(), device, 2, cudaMemcpyDeviceToHost, work), cudaSuccess);
  EXPECT_EQ(result, "ab");
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(Memory, PeersNameTheirDevices) {
  cudaStream_t work = stream();
  char* here = device_memory<char>(kBytes);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  char* there = device_memory<char>(kBytes);
  ASSERT_EQ(cudaMemset(there, 7, kBytes), cudaSuccess);

  EXPECT_EQ(cudaMemcpyPeerAsync(here, 1, there, 1, kBytes, work), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyPeerAsync(here, 0, there, 1, kBytes, work), cudaSuccess);

  ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  EXPECT_EQ(here[kBytes - 1], 7);
}

TEST_F(Memory, OfAPoolLivesInStreamOrder) {
  cudaStream_t work = stream();
  void* memory = nullptr;
  cudaMemPool_t pool = nullptr;
  std::uint64_t bytes = 0;
  ASSERT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
  std::uint64_t threshold = UINT64_MAX;
  ASSERT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
            cudaSuccess);
  ASSERT_EQ(cudaMallocAsync(&memory, kBytes, work), cudaSuccess);
  EXPECT_EQ(attributes_of(memory).type, cudaMemoryTypeDevice);
  ASSERT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes), cudaSuccess);
  EXPECT_EQ(bytes, kBytes);
  char result[kBytes] = {};
  ASSERT_EQ(cudaMemcpyAsync(result, memory, kBytes, cudaMemcpyDeviceToHost, work), cudaSuccess);
  EXPECT_EQ(result[kBytes - 1], '\xff');

  ASSERT_EQ(cudaFreeAsync(memory, work), cudaSuccess);

  EXPECT_EQ(cudaFreeAsync(memory, work), cudaErrorInvalidValue);
  ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  ASSERT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes), cudaSuccess);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(cudaMemPoolTrimTo(pool, 0), cudaSuccess);
}

TEST_F(Memory, PoolsOfOnesOwn) {
  cudaStream_t work = stream();
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = 1;
  cudaMemPool_t pool = nullptr;
  void* memory = nullptr;
  ASSERT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  EXPECT_EQ(live().pools, 1);

  ASSERT_EQ(cudaMallocFromPoolAsync(&memory, kBytes, pool, work), cudaSuccess);

  EXPECT_EQ(attributes_of(memory).device, 1);
  ASSERT_EQ(cudaFreeAsync(memory, work), cudaSuccess);
  EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
  set_machine({.has_memory_pools = false});
  EXPECT_EQ(cudaMallocAsync(&memory, kBytes, work), cudaErrorNotSupported);
}

TEST_F(Memory, UseByAStreamThatHasNotWaitedIsARace) {
  cudaStream_t first = stream(), second = stream();
  cudaEvent_t made = event();
  void* memory = nullptr;
  const auto use = [&](bool waits) {
    ASSERT_EQ(cudaMallocAsync(&memory, kBytes, first), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(made, first), cudaSuccess);
    if (waits) {
      ASSERT_EQ(cudaStreamWaitEvent(second, made, 0), cudaSuccess);
    }
    ASSERT_EQ(cudaMemsetAsync(memory, 0, kBytes, second), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(first), cudaSuccess);
    ASSERT_EQ(cudaFreeAsync(memory, first), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  };

  EXPECT_EQ(races_of([&] { use(true); }), 0);
  EXPECT_EQ(races_of([&] { use(false); }) > 0, kFindsRaces);
}

/// In a process of its own, which the address sanitizer ends.
void touch_after_free() {
  cudaStream_t work = nullptr;
  void* memory = nullptr;
  cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking);
  cudaMalloc(&memory, kBytes);
  std::atomic<bool> may_go{false};
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  cudaMemsetAsync(memory, 0, kBytes, work);
  cudaFree(memory);
  may_go.store(true);
  cudaStreamSynchronize(work);
}

void touch_after_free_async() {
  cudaStream_t work = nullptr;
  void* memory = nullptr;
  cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking);
  cudaMallocAsync(&memory, kBytes, work);
  cudaFreeAsync(memory, work);
  run_in(work, [&] { static_cast<char*>(memory)[0] = 0; });
  cudaStreamSynchronize(work);
}

void touch_behind() {
  cudaStream_t work = nullptr;
  void* memory = nullptr;
  cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking);
  cudaMalloc(&memory, kBytes);
  run_in(work, [&] { static_cast<char*>(memory)[kBytes] = 0; });
  cudaStreamSynchronize(work);
}

TEST_F(Memory, TheAddressSanitizerWatchesIt) {
  if (!kFindsBadAddresses) return;
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(touch_after_free(), "heap-use-after-free");
  EXPECT_DEATH(touch_after_free_async(), "heap-use-after-free");
  EXPECT_DEATH(touch_behind(), "heap-buffer-overflow");
}

}  // namespace
}  // namespace cpattn::fake_cuda
