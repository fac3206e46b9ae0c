// The double of the runtime: what the machine is like, and failures on demand.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/launch.h"
#include "tests/src/cuda/double_test.h"

namespace cpattn::fake_cuda {
namespace {

__global__ void do_nothing() {}

class MachineTest : public DoubleTest {
 protected:
  int attribute(cudaDeviceAttr which) {
    int value = -1;
    EXPECT_EQ(cudaDeviceGetAttribute(&value, which, 0), cudaSuccess);
    return value;
  }
};

TEST_F(MachineTest, IsWhatATestSays) {
  set_machine({.num_devices = 2,
               .compute_major = 12,
               .compute_minor = 0,
               .num_multiprocessors = 17,
               .shared_bytes_per_multiprocessor = 100 * 1024,
               .shared_bytes_per_block = 99 * 1024,
               .has_peer_access = false});
  int count = 0, can_access = -1;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 2);
  EXPECT_EQ(attribute(cudaDevAttrComputeCapabilityMajor), 12);
  EXPECT_EQ(attribute(cudaDevAttrMultiProcessorCount), 17);
  EXPECT_EQ(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), 99 * 1024);
  cudaDeviceProp properties{};
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 1), cudaSuccess);
  EXPECT_EQ(properties.major, 12);
  EXPECT_EQ(properties.multiProcessorCount, 17);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, std::size_t{99 * 1024});
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can_access, 0, 1), cudaSuccess);
  EXPECT_EQ(can_access, 0);
  set_machine({});
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can_access, 0, 1), cudaSuccess);
  EXPECT_EQ(can_access, 1);
  char first[16] = "", second[16] = "";
  EXPECT_EQ(cudaDeviceGetPCIBusId(first, sizeof(first), 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetPCIBusId(second, sizeof(second), 1), cudaSuccess);
  EXPECT_STRNE(first, second);
}

TEST_F(MachineTest, MayLackADriverOrDevices) {
  int count = -1, version = -1, device = -1;
  set_machine({.driver_version = 0});
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaDriverGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, 0);
  set_machine({.driver_version = 12080});
  EXPECT_EQ(cudaGetDevice(&device), cudaErrorInsufficientDriver);
  EXPECT_EQ(cudaRuntimeGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, CUDART_VERSION);
  set_machine({.num_devices = 0});
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorNoDevice);
  cudaStream_t none = nullptr;
  EXPECT_EQ(cudaStreamCreate(&none), cudaErrorNoDevice);
}

TEST_F(MachineTest, DeviceIsTheThreadsOwn) {
  ASSERT_EQ(cudaSetDevice(3), cudaSuccess);
  std::thread([] {
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
    EXPECT_EQ(cudaSetDevice(5), cudaSuccess);
  }).join();
  int device = -1, of_stream = -1;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  EXPECT_EQ(device, 3);
  EXPECT_EQ(cudaStreamGetDevice(stream(), &of_stream), cudaSuccess);
  EXPECT_EQ(of_stream, 3);
}

TEST_F(MachineTest, StreamsKnowHowTheyWereMade) {
  int least = -1, greatest = 1, priority = 1;
  unsigned flags = 0;
  ASSERT_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
  ASSERT_LT(greatest, least);
  cudaStream_t work = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&work, cudaStreamNonBlocking, greatest), cudaSuccess);
  EXPECT_EQ(cudaStreamGetPriority(work, &priority), cudaSuccess);
  EXPECT_EQ(cudaStreamGetFlags(work, &flags), cudaSuccess);
  EXPECT_EQ(priority, greatest);
  EXPECT_EQ(flags, unsigned{cudaStreamNonBlocking});
  EXPECT_EQ(cudaStreamDestroy(work), cudaSuccess);
}

TEST_F(MachineTest, SharedMemoryIsAskedForWithinItsLimit) {
  const auto* kernel = reinterpret_cast<const void*>(do_nothing);
  const auto ask = [&](int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  EXPECT_EQ(ask(227 * 1024), cudaSuccess);
  EXPECT_EQ(ask(227 * 1024 + 1), cudaErrorInvalidValue);
  set_machine({.shared_bytes_per_block = 99 * 1024});
  EXPECT_EQ(ask(99 * 1024 + 1), cudaErrorInvalidValue);
}

TEST_F(MachineTest, OccupancyIsLimitedByMemoryAndThreads) {
  const auto* kernel = reinterpret_cast<const void*>(do_nothing);
  const auto blocks = [&](int threads, std::size_t shared_bytes) {
    int count = -1;
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes),
              cudaSuccess);
    return count;
  };
  EXPECT_EQ(blocks(32, 0), 32);
  EXPECT_EQ(blocks(1024, 0), 2);
  EXPECT_EQ(blocks(128, 75 * 1024), 3) << "each block takes 1 KiB more";
  EXPECT_EQ(blocks(128, 76 * 1024), 2);
}

TEST_F(MachineTest, CallsFailOnDemand) {
  cudaStream_t work = stream();
  cudaEvent_t at = event();
  char* memory = device_memory<char>(8);
  char host[8] = {};
  void* made = nullptr;
  const struct {
    const char* api;
    std::function<cudaError_t()> call;
  } kCalls[] = {
      {"cudaGetDeviceCount",
       [&] {
         int n = 0;
         return cudaGetDeviceCount(&n);
       }},
      {"cudaSetDevice", [] { return cudaSetDevice(0); }},
      {"cudaMemcpyAsync",
       [&] { return cudaMemcpyAsync(memory, host, 8, cudaMemcpyHostToDevice, work); }},
      {"cudaMemsetAsync", [&] { return cudaMemsetAsync(memory, 0, 8, work); }},
      {"cudaEventRecord", [&] { return cudaEventRecord(at, work); }},
      {"cudaStreamWaitEvent", [&] { return cudaStreamWaitEvent(work, at, 0); }},
      {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(work); }},
      {"cudaMalloc",
       [&] {
         const cudaError_t error = cudaMalloc(&made, 8);
         if (error == cudaSuccess) cudaFree(made);
         return error;
       }},
  };
  for (const auto& [api, call] : kCalls) {
    SCOPED_TRACE(api);
    fail_after(api, 3, cudaErrorUnknown);
    EXPECT_EQ(call(), cudaSuccess);
    EXPECT_EQ(call(), cudaSuccess);
    EXPECT_EQ(call(), cudaErrorUnknown);
    EXPECT_EQ(cudaGetLastError(), cudaErrorUnknown);
    EXPECT_EQ(call(), cudaSuccess) << "once";
    fail_after(api, 1, cudaErrorUnknown);
    fail_after(api, 0, cudaSuccess);
    EXPECT_EQ(call(), cudaSuccess) << "taken back";
    EXPECT_GE(num_calls(api), 5u);
  }
  fail_after("cudaLaunchKernelEx", 1, cudaErrorLaunchOutOfResources);
  EXPECT_THROW(cuda::launch(do_nothing, dim3(1), dim3(1), 0, work), InternalError);
  EXPECT_NO_THROW(cuda::launch(do_nothing, dim3(1), dim3(1), 0, work));
}

TEST_F(MachineTest, CallsFailOnOneDeviceOnly) {
  fail_after("cudaMemset", 1, cudaErrorUnknown, 1);
  char* memory = device_memory<char>(1);
  EXPECT_EQ(cudaMemset(memory, 0, 1), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cudaMemset(memory, 0, 1), cudaErrorUnknown);
}

/// A program that makes several things, each of which may fail.
cudaError_t make_and_give_back() {
  cudaStream_t work = nullptr;
  void *first = nullptr, *second = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(&first, 1);
  if (error == cudaSuccess) error = cudaMalloc(&second, 1);
  cudaFree(second);
  cudaFree(first);
  if (work != nullptr) cudaStreamDestroy(work);
  return error;
}

TEST_F(MachineTest, EverySiteCanFailWithoutALeak) {
  ASSERT_EQ(make_and_give_back(), cudaSuccess);
  const auto num_sites = static_cast<int>(num_calls("cudaMalloc"));
  ASSERT_EQ(num_sites, 2);
  const Live before = live();
  for (int site = 1; site <= num_sites; ++site) {
    fail_after("cudaMalloc", site, cudaErrorMemoryAllocation);
    EXPECT_EQ(make_and_give_back(), cudaErrorMemoryAllocation);
    EXPECT_EQ(live(), before);
  }
}

TEST_F(MachineTest, ErrorsHaveNamesTextsAndReasons) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
  EXPECT_STREQ(cudaGetErrorString(cudaSuccess), "no error");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STREQ(cudaGetErrorName(static_cast<cudaError_t>(-1)), "unrecognized error code");
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  EXPECT_EQ(std::string(cudaGetErrorString(cudaErrorInvalidDevice)),
            "invalid device ordinal (device 99 of 8)");
  EXPECT_EQ(complaint(), "device 99 of 8");
}

}  // namespace
}  // namespace cpattn::fake_cuda
