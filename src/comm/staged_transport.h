// StagedTransport: shards in device memory, moved as messages of any Communicator.
//
// MPI knows no streams: bytes are handed over only once the host has seen that the stream that
// writes them is done with them, and are given to a stream only once the host has seen them arrive.
// So wait() blocks the host, and nothing of this can be captured. The time of a hop counts from
// when its bytes are ready to leave; for the caller's own stream there is no deadline.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "src/comm/communicator.h"
#include "src/device/cuda_device.h"

namespace cpattn {

enum class MessageMemory {
  pinned_host,  ///< copied to the host before, and from it afterwards, while kernels run
  device        ///< the Communicator takes device memory (takes_device_memory())
};

class StagedTransport final : public ShardTransport {
 public:
  /// Unsupported when the messages are to be of device memory and `control` does not take it.
  StagedTransport(std::shared_ptr<Communicator> control, std::shared_ptr<CudaDevice> device,
                  MessageMemory memory);

  /// "mpi, staged", "mpi, cuda-aware"
  std::string_view transport() const override { return name_; }
  Communicator& control() override { return *control_; }
  CudaDevice& device() override { return *device_; }

  /// Pinned memory is taken when a hop first needs it: in the first pass.
  /// Errors  InvalidArgument when checksums of device memory are asked for.
  std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                          const TransferOptions& options) override;
  void synchronize(Stream stream, Clock::time_point deadline) override;
  bool can_verify_checksums() const override { return memory_ == MessageMemory::pinned_host; }

 private:
  std::shared_ptr<Communicator> control_;
  std::shared_ptr<CudaDevice> device_;
  MessageMemory memory_;
  std::string name_;
};

}  // namespace cpattn
