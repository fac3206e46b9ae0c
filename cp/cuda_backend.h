// The CUDA backend: kernels, devices and transports of one installation, in a shared object of its
// own that is opened when it is asked for. So one installation works on machines with and without a
// driver, NCCL or a GPU.
//
//   auto backend = cpattn::CudaBackend::open();
//   std::shared_ptr<cpattn::Device> gpu = backend->open_device(0);
//   auto stream = backend->make_stream(gpu);
//
// Once opened, the object stays open for good. A backend must outlive the plans that use its
// kernels; devices, streams and transports may outlive it. A GpuGroup (cp/gpu_group.h) sees to
// that, and is what an attention on GPUs is made from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/comm/communicator.h"
#include "src/comm/shard_transport.h"
#include "src/device/device.h"

namespace cpattn {

struct CudaDeviceFacts {
  int ordinal = 0;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::vector<int> peers;  ///< devices whose memory it can access
  std::string refusal;     ///< why kernels() would refuse it; "" when it is supported
};

/// Where a device's memory comes from: cudaMalloc, unless both are set. `allocate` returns null
/// when it cannot; calls come from one thread at a time. Where ranks of one process exchange by
/// NCCL, their devices must see it: memory of a pool they see only after cudaMemPoolSetAccess.
struct CudaAllocator {
  /// Memory for work of `stream`, aligned to 256 bytes.
  void* (*allocate)(void* context, std::size_t size_bytes, Stream stream) = nullptr;
  void (*free)(void* context, void* memory) noexcept = nullptr;
  void* context = nullptr;
  std::shared_ptr<void> owner = nullptr;  ///< kept until the last memory was given back
};

/// A stream that this process made; work given to it does not wait for the legacy default stream.
class OwnedStream {
 public:
  OwnedStream() = default;
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  virtual ~OwnedStream() = default;
  virtual Stream get() const = 0;
};

/// Work that was recorded once and is given to a stream as one piece (a CUDA graph).
class OwnedGraph {
 public:
  OwnedGraph() = default;
  OwnedGraph(const OwnedGraph&) = delete;
  OwnedGraph& operator=(const OwnedGraph&) = delete;
  virtual ~OwnedGraph() = default;
  /// In the order of `stream`. Whatever the work reads and writes is read and written anew.
  virtual void replay(Stream stream) = 0;
};

class CudaBackend {
 public:
  /// Opens the shared object at `path`; "": the one that was installed or built beside this
  /// library.
  /// Errors  Unsupported: it is not there, its libraries are not, it is of another version; says
  ///         what the system said.
  static std::shared_ptr<CudaBackend> open(const std::string& path = "");

  CudaBackend() = default;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;
  virtual ~CudaBackend() = default;

  /// "CUDA runtime 13.0, driver 13.0, NCCL 2.28.9"; begins with "doubles on the CPU, no GPU: " when
  /// it was linked with the tests' doubles.
  virtual std::string description() const = 0;
  /// Why there is no device: no driver, driver older than the runtime, none visible; "" otherwise.
  virtual std::string refusal() const = 0;
  virtual std::vector<CudaDeviceFacts> devices() const = 0;

  /// Errors  Unsupported: refusal(), or that of the device; InvalidArgument: no such ordinal.
  virtual std::shared_ptr<Device> open_device(int ordinal, const CudaAllocator& allocator) = 0;
  std::shared_ptr<Device> open_device(int ordinal) { return open_device(ordinal, {}); }
  /// Those for a device of this backend.
  virtual const KernelTable& kernels(const std::shared_ptr<Device>& device) = 0;
  /// Those that a device would have, for making plans: names and sizes, on any machine. Nothing of
  /// it is to be launched.
  ///
  /// `compute_capability`  90 is sm_90
  /// Errors  Unsupported: no kernels for it; InvalidArgument: no multiprocessors.
  virtual KernelTable kernels_for_plans(int compute_capability, int multiprocessors) const = 0;
  virtual std::unique_ptr<OwnedStream> make_stream(const std::shared_ptr<Device>& device) = 0;
  /// Records what `work` gives to `stream`, as a trainer's own capture would: a first call made
  /// outside, so that nothing has to be allocated; no waiting inside.
  /// Errors  DeviceError: something in `work` cannot be captured; what `work` throws. Nothing was
  ///         done then, and the stream can be used.
  virtual std::unique_ptr<OwnedGraph> capture(const std::shared_ptr<Device>& device, Stream stream,
                                              const std::function<void()>& work) = 0;

  /// Shards travel by NCCL on a stream of their own. Collective over `control`.
  ///
  /// `nccl_comm`  an ncclComm_t whose ranks are those of `control`, which stays the caller's; null:
  ///              one is made.
  /// Errors       InvalidArgument on every rank: two ranks on one device, ranks that differ;
  ///              CommError: NCCL failed or a rank is late.
  virtual std::shared_ptr<ShardTransport> nccl_transport(
      const std::shared_ptr<Communicator>& control, const std::shared_ptr<Device>& device,
      void* nccl_comm, Seconds timeout) = 0;

  /// Shards travel as messages of `control`, through pinned host memory, or straight from device
  /// memory where it takes that (CUDA-aware MPI). Any number of ranks on a device; no graphs.
  virtual std::shared_ptr<ShardTransport> host_transport(
      const std::shared_ptr<Communicator>& control, const std::shared_ptr<Device>& device) = 0;
};

/// What the shared object exports: the backend, or null when `interface` is not the one it was
/// built with. The caller deletes it before it closes the object.
inline constexpr std::uint32_t kCudaBackendInterface = 5;
inline constexpr const char* kCudaBackendSymbol = "cpattn_cuda_backend";
using MakeCudaBackend = CudaBackend* (*)(std::uint32_t interface);

}  // namespace cpattn
