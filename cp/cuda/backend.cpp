// What the shared object of the CUDA backend exports (cp/cuda_backend.h).

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cp/cuda_backend.h"
#include "kernels/cuda/kernel_table.h"
#include "src/base/error.h"
#include "src/comm/nccl_transport.h"
#include "src/comm/staged_transport.h"
#include "src/device/cuda_device.h"
#include "src/device/cuda_graph.h"
#include "src/device/cuda_handles.h"

namespace cpattn {
namespace {

/// Thread blocks of ours that share a multiprocessor; more would wait, and each has a workspace.
constexpr int kBlocksPerMultiprocessor = 2;

KernelTable table_for(int compute_capability, int multiprocessors) {
  constexpr int kHopper = 90;  // wgmma is of this architecture alone
  const bool is_hopper = compute_capability == kHopper;
  KernelTable table = is_hopper ? cuda::sm90_kernels() : cuda::sm80_kernels();
#if defined(CP_CUDA_DOUBLES)  // what they compute must not be taken for a GPU's
  table.name = is_hopper ? "doubles of cuda/sm90" : "doubles of cuda/sm80";
#endif
  table.num_workers = kBlocksPerMultiprocessor * multiprocessors;
  return table;
}

std::shared_ptr<CudaDevice> as_cuda(const std::shared_ptr<Device>& device) {
  auto cuda = std::dynamic_pointer_cast<CudaDevice>(device);
  require(cuda != nullptr, "device is ", device == nullptr ? "null" : device->description(),
          ", expected one that this backend opened");
  return cuda;
}

/// 13000 is 13.0.
std::string version_text(int version) {
  constexpr int kMajor = 1000, kMinor = 10;
  return detail::concat(version / kMajor, '.', version % kMajor / kMinor);
}

/// 22809 is 2.28.9.
std::string nccl_version_text() {
  constexpr int kMajor = 10000, kMinor = 100;
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return detail::concat(version / kMajor, '.', version % kMajor / kMinor, '.', version % kMinor);
}

CudaDeviceFacts facts_of(int ordinal, int num_devices) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  CudaDeviceFacts facts{.ordinal = ordinal,
                        .name = properties.name,
                        .compute_major = properties.major,
                        .compute_minor = properties.minor,
                        .multiprocessors = properties.multiProcessorCount,
                        .memory_bytes = properties.totalGlobalMem,
                        .peers = {},
                        .refusal = {}};
  for (int peer = 0; peer < num_devices; ++peer) {
    if (peer != ordinal && can_access_peer(ordinal, peer)) facts.peers.push_back(peer);
  }
  try {
    CudaDevice device(ordinal);
  } catch (const Unsupported& error) {
    facts.refusal = error.what();
  }
  return facts;
}

DeviceAllocator allocator_of(const CudaAllocator& caller) {
  require((caller.allocate == nullptr) == (caller.free == nullptr),
          "allocator has one of allocate and free, expected both or none");
  if (caller.allocate == nullptr) return {};
  return {[caller](std::size_t bytes, Stream stream) {
            return caller.allocate(caller.context, bytes, stream);
          },
          [caller](void* memory) { caller.free(caller.context, memory); }};
}

class DeviceStream final : public OwnedStream {
 public:
  explicit DeviceStream(const CudaDevice& device) {
    const DeviceGuard guard(device.ordinal());
    stream_ = make_cuda_stream();
  }
  Stream get() const override { return {stream_.get()}; }

 private:
  CudaStream stream_;
};

class DeviceGraph final : public OwnedGraph {
 public:
  DeviceGraph(Stream stream, const std::function<void()>& work)
      : graph_(static_cast<cudaStream_t>(stream.handle), work) {}
  void replay(Stream stream) override { graph_.replay(static_cast<cudaStream_t>(stream.handle)); }

 private:
  CudaGraph graph_;
};

class Backend final : public CudaBackend {
 public:
  std::string description() const override {
    const CudaFacts facts = cuda_facts();
    const std::string driver =
        facts.driver_version == 0 ? "none" : version_text(facts.driver_version);
#if defined(CP_CUDA_DOUBLES)
    constexpr const char* kKind = "doubles on the CPU, no GPU: ";
#else
    constexpr const char* kKind = "";
#endif
    return detail::concat(kKind, "CUDA runtime ", version_text(facts.runtime_version), ", driver ",
                          driver, ", NCCL ", nccl_version_text());
  }

  std::string refusal() const override { return cuda_facts().problem; }

  std::vector<CudaDeviceFacts> devices() const override {
    const CudaFacts facts = cuda_facts();
    std::vector<CudaDeviceFacts> devices;
    if (!facts.problem.empty()) return devices;
    for (int ordinal = 0; ordinal < facts.num_devices; ++ordinal)
      devices.push_back(facts_of(ordinal, facts.num_devices));
    return devices;
  }

  std::shared_ptr<Device> open_device(int ordinal, const CudaAllocator& allocator) override {
    return std::make_shared<CudaDevice>(ordinal, allocator_of(allocator));
  }

  const KernelTable& kernels(const std::shared_ptr<Device>& device) override {
    const std::shared_ptr<CudaDevice> gpu = as_cuda(device);
    const std::lock_guard lock(mutex_);
    return tables_
        .try_emplace(gpu->ordinal(),
                     table_for(gpu->compute_capability(), gpu->num_multiprocessors()))
        .first->second;
  }

  KernelTable kernels_for_plans(int compute_capability, int multiprocessors) const override {
    require<Unsupported>(compute_capability >= kLeastCapability, "sm_", compute_capability,
                         ": the kernels need sm_", kLeastCapability, " or newer");
    require(multiprocessors > 0, "multiprocessors ", multiprocessors, ", expected at least 1");
    return table_for(compute_capability, multiprocessors);
  }

  std::unique_ptr<OwnedStream> make_stream(const std::shared_ptr<Device>& device) override {
    return std::make_unique<DeviceStream>(*as_cuda(device));
  }

  std::unique_ptr<OwnedGraph> capture(const std::shared_ptr<Device>& device, Stream stream,
                                      const std::function<void()>& work) override {
    const DeviceGuard guard(as_cuda(device)->ordinal());
    return std::make_unique<DeviceGraph>(stream, work);
  }

  std::shared_ptr<ShardTransport> nccl_transport(const std::shared_ptr<Communicator>& control,
                                                 const std::shared_ptr<Device>& device,
                                                 void* nccl_comm, Seconds timeout) override {
    require(control != nullptr, "control is null, expected a communicator");
    const std::shared_ptr<CudaDevice> gpu = as_cuda(device);
    auto* const theirs = static_cast<ncclComm_t>(nccl_comm);
    return std::make_shared<NcclTransport>(
        control, gpu,
        theirs == nullptr ? NcclCommunicator::make(*control, *gpu, timeout)
                          : NcclCommunicator::borrow(*control, *gpu, theirs, timeout));
  }

  std::shared_ptr<ShardTransport> host_transport(const std::shared_ptr<Communicator>& control,
                                                 const std::shared_ptr<Device>& device) override {
    require(control != nullptr, "control is null, expected a communicator");
    return std::make_shared<StagedTransport>(
        control, as_cuda(device),
        control->takes_device_memory() ? MessageMemory::device : MessageMemory::pinned_host);
  }

 private:
  std::mutex mutex_;
  std::map<int, KernelTable> tables_;  // by ordinal: each knows how many blocks its GPU holds
};

}  // namespace
}  // namespace cpattn

extern "C" __attribute__((visibility("default"))) cpattn::CudaBackend* cpattn_cuda_backend(
    std::uint32_t interface) {
  return interface == cpattn::kCudaBackendInterface ? new cpattn::Backend : nullptr;
}
