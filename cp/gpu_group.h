// GpuGroup: ranks with a GPU each, as the group of an attention.
//
//   auto group = cpattn::GpuGroup::make(my_ranks, {.device = local_rank});   // any Communicator
//   cpattn::ContextParallelAttention attention(group, {.chunk_tokens = 4096}, &group->kernels());
//   auto plan = attention.plan(problem);
//   plan->forward(tensors_in_device_memory, {my_cuda_stream});
//
// It keeps the backend that its kernels are in, and a plan keeps its group: so nothing else has to
// be kept. One text for all ranks where a part is missing on any.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "cp/cuda_backend.h"
#include "src/base/enum_names.h"
#include "src/comm/communicator.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

/// What moves shards between GPUs.
enum class GpuExchange {
  automatic,  ///< nccl where every rank has a GPU of its own, else host
  nccl,
  host,  ///< messages of the ranks, through host memory; cannot be captured
};

template <>
struct EnumNames<GpuExchange> {
  static constexpr std::array kValues{NamedValue<GpuExchange>{GpuExchange::automatic, "auto"},
                                      NamedValue<GpuExchange>{GpuExchange::nccl, "nccl"},
                                      NamedValue<GpuExchange>{GpuExchange::host, "host"}};
};

struct GpuOptions {
  int device = 0;  ///< ordinal, as the CUDA runtime of this process counts
  GpuExchange exchange = GpuExchange::automatic;
  /// An ncclComm_t of the same ranks on these devices, which stays the caller's and which nobody
  /// else uses meanwhile; null: one is made. Not for exchange host.
  void* nccl_comm = nullptr;
  std::string backend;      ///< path of the shared object; "": the installed one
  CudaAllocator allocator;  ///< of what plans take
  Seconds timeout{60.0};    ///< of making it
};

class GpuGroup final : public ShardTransport {
 public:
  /// Collective over `control`, which travels along: agreements and refusals go over it.
  /// Errors  on every rank, with one text: Unsupported where a rank has no backend, no driver, one
  ///         too old, no GPU, or one too old; InvalidArgument where a rank has no such device,
  ///         where exchanges differ, where two ranks have one GPU with exchange nccl, for an NCCL
  ///         communicator that is destroyed or of other ranks or devices; DeviceError, CommError.
  static std::shared_ptr<GpuGroup> make(std::shared_ptr<Communicator> control,
                                        const GpuOptions& options);

  /// Takes part in the other ranks' make() only to refuse it: InvalidArgument on every rank. For
  /// bindings, whose own arguments may be wrong before there are options to pass.
  static void refuse(Communicator& control, std::string_view why);

  const KernelTable& kernels() const { return *kernels_; }
  const std::shared_ptr<CudaBackend>& backend() const { return backend_; }
  std::unique_ptr<OwnedStream> make_stream() const { return backend_->make_stream(device_); }
  /// See CudaBackend::capture().
  std::unique_ptr<OwnedGraph> capture(Stream stream, const std::function<void()>& work) const {
    return backend_->capture(device_, stream, work);
  }

  /// "nccl", "mpi, staged", "mpi, cuda-aware", ...
  std::string_view transport() const override { return shards_->transport(); }
  Communicator& control() override { return *control_; }
  Device& device() override { return *device_; }
  std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                          const TransferOptions& options) override;
  void synchronize(Stream stream, Clock::time_point deadline) override {
    shards_->synchronize(stream, deadline);
  }
  bool can_verify_checksums() const override { return shards_->can_verify_checksums(); }
  bool can_capture() const override { return shards_->can_capture(); }

 private:
  GpuGroup(std::shared_ptr<Communicator> control, std::shared_ptr<CudaBackend> backend,
           std::shared_ptr<Device> device, std::shared_ptr<ShardTransport> shards);

  std::shared_ptr<Communicator> control_;
  std::shared_ptr<CudaBackend> backend_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<ShardTransport> shards_;
  const KernelTable* kernels_;
};

}  // namespace cpattn
