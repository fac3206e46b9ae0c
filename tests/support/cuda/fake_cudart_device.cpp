// The runtime's functions of devices, kernels' attributes, versions and errors.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_state.h"

using namespace cpattn::fake_cuda;

namespace {

constexpr int kWarpLanes = 32, kMaxBlockThreads = 1024, kMaxThreads = 2048, kMaxBlocks = 32;
constexpr std::size_t kSharedWithoutAsking = 48 * 1024;
constexpr std::size_t kSharedReserved = 1024;  // of each block, by the system
constexpr int kRegisters = 64 * 1024;

cudaError_t check_driver() {
  if (machine().driver_version == 0 || machine().driver_version < machine().runtime_version) {
    return refuse(cudaErrorInsufficientDriver, "the driver knows CUDA up to version ",
                  machine().driver_version);
  }
  return machine().num_devices == 0 ? refuse(cudaErrorNoDevice, "no device") : cudaSuccess;
}

cudaError_t check_device(int device) {
  if (const cudaError_t error = check_driver(); error != cudaSuccess) return error;
  if (device >= 0 && device < machine().num_devices) return cudaSuccess;
  return refuse(cudaErrorInvalidDevice, "device ", device, " of ", machine().num_devices);
}

cudaError_t attribute_of(cudaDeviceAttr attribute, int device, int* value) {
  const Machine& it = machine();
  switch (static_cast<int>(attribute)) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = it.compute_major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = it.compute_minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = it.num_multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(kSharedWithoutAsking);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(it.shared_bytes_per_block);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(it.shared_bytes_per_multiprocessor);
      return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = static_cast<int>(kSharedReserved);
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxBlockThreads;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kMaxThreads;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = kWarpLanes;
      return cudaSuccess;
    case cudaDevAttrMemoryPoolsSupported:
      *value = it.has_memory_pools ? 1 : 0;
      return cudaSuccess;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      return cudaSuccess;
    case cudaDevAttrPciBusId:
      *value = device + 1;
      return cudaSuccess;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated:
    case cudaDevAttrManagedMemory:
      *value = 0;
      return cudaSuccess;
  }
  return refuse(cudaErrorNotSupported, "cudaDeviceGetAttribute: attribute ",
                static_cast<int>(attribute));
}

void describe(int device, cudaDeviceProp* properties) {
  const Machine& it = machine();
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "double of a device (sm_%d%d)",
                it.compute_major, it.compute_minor);
  properties->totalGlobalMem = it.memory_bytes;
  properties->sharedMemPerBlock = kSharedWithoutAsking;
  properties->sharedMemPerBlockOptin = it.shared_bytes_per_block;
  properties->sharedMemPerMultiprocessor = it.shared_bytes_per_multiprocessor;
  properties->reservedSharedMemPerBlock = kSharedReserved;
  properties->regsPerBlock = kRegisters;
  properties->regsPerMultiprocessor = kRegisters;
  properties->warpSize = kWarpLanes;
  properties->maxThreadsPerBlock = kMaxBlockThreads;
  properties->maxThreadsPerMultiProcessor = kMaxThreads;
  properties->maxBlocksPerMultiProcessor = kMaxBlocks;
  properties->major = it.compute_major;
  properties->minor = it.compute_minor;
  properties->multiProcessorCount = it.num_multiprocessors;
  properties->pciBusID = device + 1;
  properties->unifiedAddressing = 1;
  properties->memoryPoolsSupported = it.has_memory_pools ? 1 : 0;
  std::memset(properties->uuid.bytes, device + 1, sizeof(properties->uuid.bytes));
}

}  // namespace

cudaError_t cudaDriverGetVersion(int* version) {
  Api::named(__func__).enter();
  *version = machine().driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  Api::named(__func__).enter();
  *version = machine().runtime_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *count = 0;
    const cudaError_t error = check_driver();
    if (error == cudaSuccess) *count = machine().num_devices;
    return error;
  });
}

cudaError_t cudaSetDevice(int device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_device(device);
    if (error == cudaSuccess) current_device() = device;
    return error;
  });
}

cudaError_t cudaGetDevice(int* device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *device = current_device();
    return check_device(*device);
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_device(device);
    if (error == cudaSuccess) describe(device, properties);
    return error;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_device(device);
    return error != cudaSuccess ? error : attribute_of(attribute, device, value);
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    const cudaError_t error = check_device(device);
    if (error == cudaSuccess) {
      std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
    }
    return error;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    cudaError_t error = check_device(device);
    if (error == cudaSuccess) error = check_device(peer);
    *can_access = error == cudaSuccess && device != peer && machine().has_peer_access ? 1 : 0;
    return error;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (function == nullptr) return refuse(cudaErrorInvalidDeviceFunction, "no function");
    const bool is_size = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (is_size &&
        (value < 0 || static_cast<std::size_t>(value) > machine().shared_bytes_per_block)) {
      return refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute: ", value,
                    " bytes of shared memory; this device has ", machine().shared_bytes_per_block);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* function,
                                                          int block_size,
                                                          std::size_t shared_bytes) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (function == nullptr) return refuse(cudaErrorInvalidDeviceFunction, "no function");
    if (block_size < 1 || block_size > kMaxBlockThreads) {
      return refuse(cudaErrorInvalidValue, "a block of ", block_size, " threads");
    }
    // Registers are the compiler's: here, nobody's limit.
    const std::size_t by_memory =
        machine().shared_bytes_per_multiprocessor / (shared_bytes + kSharedReserved);
    *num_blocks = std::min({kMaxBlocks, kMaxThreads / block_size, static_cast<int>(by_memory)});
    return cudaSuccess;
  });
}
