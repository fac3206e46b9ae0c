#include "src/device/cuda_device.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <vector>

#include "src/base/error.h"
#include "src/device/cuda_handles.h"
#include "tests/src/comm_world.h"  // text_thrown_by
#include "tests/src/cuda/double_test.h"

namespace cpattn {
namespace {

class CudaDevices : public fake_cuda::DoubleTest {};

TEST_F(CudaDevices, DescribeThemselves) {
  const CudaDevice device(2);
  EXPECT_EQ(device.description(), "cuda:2 double of a device (sm_90), sm_90, 4 multiprocessors");
  EXPECT_EQ(device.kind(), DeviceKind::cuda);
  EXPECT_EQ(device.ordinal(), 2);
  EXPECT_EQ(device.compute_capability(), 90);
  EXPECT_EQ(device.uuid().size(), 16u);
  EXPECT_NE(device.uuid(), CudaDevice(3).uuid());
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0) << "the caller's stays";
}

TEST_F(CudaDevices, MemoryIsZerosAlignedAndTheirs) {
  CudaDevice device(1);
  std::vector<std::byte> bytes(1001, std::byte{7});
  const Buffer buffer = device.allocate(bytes.size());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0u);
  EXPECT_EQ(device.problem_with(buffer.data()), "");
  device.download(bytes, buffer.data());
  EXPECT_EQ(bytes, std::vector<std::byte>(bytes.size(), std::byte{0}));
  bytes[1000] = std::byte{9};
  device.upload(buffer.data(), bytes);
  std::vector<std::byte> back(bytes.size());
  device.download(back, buffer.data());
  EXPECT_EQ(back, bytes);
  EXPECT_EQ(device.allocate(0).data(), nullptr);
}

TEST_F(CudaDevices, BuffersOutliveThem) {
  Buffer buffer;
  {
    CudaDevice device(0);
    buffer = device.allocate(64);
  }
  buffer = {};
}

// Whoever frees need not know who is still writing: the address and the thread sanitizer would.
TEST_F(CudaDevices, MemoryGoesWhenItsStreamsAreDone) {
  CudaDevice device(0);
  cudaStream_t work = stream();
  Buffer buffer = device.allocate(64);
  fake_cuda::run_in(work, [at = buffer.as<int>()] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    *at = 1;
  });
  buffer = {};
  EXPECT_EQ(cudaStreamQuery(work), cudaSuccess) << "giving it back has waited";
}

TEST_F(CudaDevices, WhatCannotBeHadIsNamed) {
  fake_cuda::set_machine({.memory_bytes = 1 << 20});
  CudaDevice device(1);
  EXPECT_EQ(text_thrown_by<InvalidArgument>([&] { device.allocate(1 << 21); }),
            "cuda:1: cannot allocate 2097152 bytes of device memory");
  fake_cuda::fail_after("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
  EXPECT_EQ(text_thrown_by<InvalidArgument>([&] { device.allocate_pinned(100); }),
            "cuda:1: cannot allocate 100 bytes of pinned host memory");
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "nothing is left for the caller's own check";

  fake_cuda::fail_after("cudaMalloc", 1, cudaErrorIllegalAddress);
  EXPECT_EQ(text_thrown_by<DeviceError>([&] { device.allocate(100); }).find("cuda:1: "), 0u);
  for (const char* api : {"cudaMemsetAsync", "cudaStreamSynchronize"}) {
    fake_cuda::fail_after(api, 1, cudaErrorUnknown);
    EXPECT_THROW(device.allocate(100), DeviceError) << api;
  }
}

TEST_F(CudaDevices, ACallersAllocatorIsUsed) {
  std::vector<std::size_t> taken;
  int num_freed = 0;
  std::size_t offset = 0;
  DeviceAllocator allocator;
  allocator.allocate = [&](std::size_t bytes, Stream stream) -> void* {
    EXPECT_NE(stream.handle, nullptr);
    taken.push_back(bytes);
    if (bytes > 1000) return nullptr;
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes + 256), cudaSuccess);
    return static_cast<std::byte*>(memory) + offset;
  };
  allocator.free = [&](void* memory) {
    ++num_freed;
    EXPECT_EQ(cudaFree(static_cast<std::byte*>(memory) - offset), cudaSuccess);
  };
  CudaDevice device(0, allocator);
  {
    const Buffer buffer = device.allocate(100);
    EXPECT_THROW(device.allocate(1001), InvalidArgument);
    offset = 0;
  }
  EXPECT_EQ(taken, (std::vector<std::size_t>{100, 1001}));
  EXPECT_EQ(num_freed, 1);
  offset = 128;
  EXPECT_NE(text_thrown_by<InvalidArgument>([&] {
              device.allocate(100);
            }).find("expected a multiple of 256"),
            std::string::npos);
  EXPECT_EQ(num_freed, 2) << "given back";
}

TEST_F(CudaDevices, AskingLeavesNothingForTheCallersOwnCheck) {
  cudaStream_t work = stream();
  std::atomic<bool> may_end = false;
  fake_cuda::run_in(work, [&] {
    while (!may_end) std::this_thread::yield();
  });
  EXPECT_FALSE(is_cuda_done(cudaStreamQuery(work), "cudaStreamQuery"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  may_end = true;
}

TEST_F(CudaDevices, AddressesTheyMustNotBeGiven) {
  CudaDevice device(0), other(1);
  const Buffer mine = device.allocate(64), theirs = other.allocate(64);
  const Buffer pinned = device.allocate_pinned(64);
  int on_stack = 0;
  EXPECT_EQ(device.problem_with(mine.data() + 16), "");
  EXPECT_EQ(device.problem_with(&on_stack), "host memory, expected memory of cuda:0");
  EXPECT_EQ(device.problem_with(pinned.data()), "host memory, expected memory of cuda:0");
  EXPECT_EQ(device.problem_with(theirs.data()), "memory of cuda:1, expected memory of cuda:0");
  const std::string text = device.problem_with(mine.data() + 8);
  EXPECT_EQ(text.find("address 0x"), 0u);
  EXPECT_NE(text.find(", expected a multiple of 16"), std::string::npos);
}

TEST_F(CudaDevices, StreamsTheyMustNotBeGiven) {
  CudaDevice device(0), other(1);
  cudaStream_t mine = stream();
  EXPECT_EQ(device.problem_with(Stream{mine}), "");
  EXPECT_EQ(other.problem_with(Stream{mine}), "stream: of cuda:0, expected a stream of cuda:1");
  for (cudaStream_t none : {cudaStream_t{}, cudaStreamLegacy}) {
    EXPECT_EQ(device.problem_with(Stream{none}),
              "stream: the legacy default stream, which waits for every other; expected a stream "
              "of cuda:0");
    EXPECT_FALSE(device.is_capturing(Stream{none}));
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);

  EXPECT_FALSE(device.is_capturing(Stream{mine}));
  ASSERT_EQ(cudaStreamBeginCapture(mine, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_TRUE(device.is_capturing(Stream{mine}));
  EXPECT_EQ(device.problem_with(Stream{mine}), "") << "a stream in capture may be given";
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(mine, &graph), cudaSuccess) << "and the questions did not end it";
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// The legacy default stream too, which kernels are not given.
TEST_F(CudaDevices, OrderStreams) {
  CudaDevice device(0);
  fake_cuda::set_machine({.has_default_stream = true});
  fake_cuda::set_delays(3, 2000);
  cudaStream_t one = stream(), other = stream();
  static int value = 0, seen = 0;
  for (const auto& [before, after] :
       {std::pair{one, other}, std::pair{cudaStream_t{}, other}, std::pair{one, cudaStream_t{}}}) {
    value = seen = 0;
    fake_cuda::run_in(before, [] { value = 1; });
    device.order({before}, {after});
    fake_cuda::run_in(after, [] { seen = value; });
    ASSERT_EQ(cudaStreamSynchronize(after), cudaSuccess);
    EXPECT_EQ(seen, 1);
  }
}

TEST_F(CudaDevices, AreToldApartByTheirUuid) {
  const CudaDevice device(0), same(0), other(1);
  EXPECT_EQ(device.uuid().size(), 16u);
  EXPECT_EQ(device.uuid(), same.uuid());
  EXPECT_NE(device.uuid(), other.uuid());
  EXPECT_EQ(CpuDevice().uuid(), "");
}

TEST_F(CudaDevices, MachinesWithoutOneSaySoOnce) {
  struct Case {
    fake_cuda::Machine machine;
    const char* text;
  };
  const Case kCases[] = {
      {{.driver_version = 0}, "cuda:0: no CUDA driver on this machine"},
      {{.driver_version = 12040, .runtime_version = 13000},
       "cuda:0: the CUDA driver is older than the library: it knows CUDA up to 12.4, expected 13.0 "
       "(update the driver)"},
      {{.num_devices = 0}, "cuda:0: a CUDA driver, but no GPU that it gives to this process"},
      {{.compute_major = 7, .compute_minor = 5},
       "cuda:0 double of a device (sm_75) is sm_75: the kernels need sm_80 or newer"},
  };
  for (const auto& [machine, text] : kCases) {
    fake_cuda::set_machine(machine);
    EXPECT_EQ(text_thrown_by<Unsupported>([] { CudaDevice device(0); }), text);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  }
  fake_cuda::set_machine({.num_devices = 2});
  EXPECT_EQ(text_thrown_by<InvalidArgument>([] { CudaDevice device(2); }),
            "device cuda:2: this machine has cuda:0 to cuda:1");
  EXPECT_THROW(CudaDevice(-1), InvalidArgument);
}

TEST_F(CudaDevices, FactsNeverThrow) {
  fake_cuda::set_machine({.num_devices = 3, .driver_version = 13010, .runtime_version = 13000});
  const CudaFacts facts = cuda_facts();
  EXPECT_EQ(facts.num_devices, 3);
  EXPECT_EQ(facts.driver_version, 13010);
  EXPECT_EQ(facts.runtime_version, 13000);
  EXPECT_EQ(facts.problem, "");
  EXPECT_TRUE(can_access_peer(0, 1));
  fake_cuda::set_machine({.has_peer_access = false});
  EXPECT_FALSE(can_access_peer(0, 1));
  fake_cuda::set_machine({.driver_version = 0});
  EXPECT_EQ(cuda_facts().num_devices, 0);
  EXPECT_NE(cuda_facts().problem, "");
  EXPECT_THROW(can_access_peer(0, 1), DeviceError);
}

TEST_F(CudaDevices, CountThreadBlocksThatRunAtOnce) {
  fake_cuda::set_machine({.num_multiprocessors = 10});
  const CudaDevice device(0);
  const auto* kernel = reinterpret_cast<const void*>(&cuda_facts);
  EXPECT_EQ(device.resident_blocks(kernel, 256, 100 * 1024), 20);
  EXPECT_THROW(device.resident_blocks(kernel, 2000, 0), DeviceError);
}

TEST_F(CudaDevices, HandlesGiveThemselvesBack) {
  CudaStream first = make_cuda_stream(), second;
  EXPECT_EQ(fake_cuda::live().streams, 1);
  second = std::move(first);
  EXPECT_EQ(first.get(), nullptr);
  const CudaStream third(std::move(second));
  EXPECT_EQ(fake_cuda::live().streams, 1);
  {
    const CudaEvent event = make_cuda_event();
    EXPECT_EQ(fake_cuda::live().events, 1);
  }
  EXPECT_EQ(fake_cuda::live().events, 0);
  fake_cuda::fail_after("cudaEventCreateWithFlags", 1, cudaErrorMemoryAllocation);
  EXPECT_EQ(text_thrown_by<DeviceError>([] {
              (void)make_cuda_event();
            }).find("cudaEventCreateWithFlags: "),
            0u);
  EXPECT_THROW(DeviceGuard(99), DeviceError);
}

}  // namespace
}  // namespace cpattn
