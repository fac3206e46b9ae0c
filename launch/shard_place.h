// ShardPlace: where the shards of this process's lanes live, and what moves them: its own memory
// and the messages of its ranks, or a GPU.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cp/gpu_group.h"
#include "launch/run_config.h"
#include "launch/world.h"
#include "src/base/tensor_view.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

class ShardPlace {
 public:
  /// Host memory; kernels as --isa says.
  static ShardPlace on_cpu(const RunConfig& config);
  /// A GPU: this rank's among those of its host. Collective.
  /// Errors  Unsupported: no backend, no driver, no GPU, with what would help; InvalidArgument:
  ///         --exchange nccl with more ranks than GPUs.
  static ShardPlace on_gpu(const RunConfig& config, World& world);

  const KernelTable& kernels() const { return *kernels_; }
  /// `comm`, or what moves the shards of GPUs.
  ShardTransport& transport(Communicator& comm) const {
    if (gpu_ != nullptr) return *gpu_;
    return comm;
  }
  Stream stream() const { return stream_ ? stream_->get() : Stream{}; }
  /// Of a GPU: what it is and runs on; begins as CudaBackend::description() does.
  std::string description() const;
  /// Whether the backend was linked with doubles of CUDA: then no time says anything of a GPU.
  bool is_double() const { return gpu_->backend()->description().starts_with("doubles"); }
  /// Of a GPU: see CudaBackend::capture().
  std::unique_ptr<OwnedGraph> capture(const std::function<void()>& work) const;
  /// Threads of a rank do not matter on a GPU.
  bool is_gpu() const { return gpu_ != nullptr; }

 private:
  ShardPlace() = default;

  std::shared_ptr<GpuGroup> gpu_;
  std::unique_ptr<OwnedStream> stream_;
  const KernelTable* kernels_ = nullptr;
};

/// Tensors of the host as kernels of a device see them: the same on the CPU, copies on a GPU.
/// Contiguous ones only.
class PlacedTensors {
 public:
  explicit PlacedTensors(Device& device) : device_(device) {}

  /// Copied there.
  AnyTensor input(const AnyConstTensor& host);
  TensorView<float, 2> input(const TensorView<const float, 2>& host);
  /// Copied there too (rows that nobody writes keep what they were), and back by fetch().
  AnyTensor output(const AnyTensor& host);
  TensorView<float, 2> output(const TensorView<float, 2>& host);
  void fetch();

 private:
  struct Copy {
    Buffer there;
    std::span<std::byte> here;
  };
  std::byte* place(const void* data, std::size_t size_bytes);

  Device& device_;
  std::vector<Buffer> inputs_;
  std::vector<Copy> outputs_;
};

}  // namespace cpattn
