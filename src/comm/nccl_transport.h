// NcclTransport: shards in device memory, moved by NCCL.
//
// All transfers of a group, those of a ring and those of a direct exchange, share one communicator
// and one stream, in the order in which they are started. Around each stand two events: the
// communication stream waits for the compute stream before it (what is sent is written, what is
// received into is no longer read), and the compute stream waits for it afterwards. start() and
// wait() only put work into streams, so both can be captured; errors, deadlines, and what is
// promised of replays: nccl_queue.h.
//
// Work of one group is given to one compute stream at a time: that of another one must have been
// ordered after it.
#pragma once

#include <memory>
#include <string_view>

#include "src/comm/nccl_queue.h"
#include "src/comm/shard_transport.h"

namespace cpattn {

class NcclTransport final : public ShardTransport {
 public:
  /// `communicator` is of the ranks of `control` and of `device`.
  NcclTransport(std::shared_ptr<Communicator> control, std::shared_ptr<CudaDevice> device,
                NcclCommunicator communicator);
  ~NcclTransport() override;

  std::string_view transport() const override { return "nccl"; }
  Communicator& control() override { return *control_; }
  CudaDevice& device() override { return *device_; }

  /// Connects the peers that a transfer of this kind may have: the neighbours of a ring, or all.
  /// Blocks for it, so not in a capture. stats() then count a captured transfer once, whatever is
  /// replayed, and no time.
  /// Errors  InvalidArgument when checksums are asked for; CommError when a peer does not come.
  std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                          const TransferOptions& options) override;
  /// InvalidArgument for a stream in capture.
  void synchronize(Stream stream, Clock::time_point deadline) override;

  bool can_verify_checksums() const override { return false; }
  bool can_capture() const override { return true; }

 private:
  std::shared_ptr<Communicator> control_;
  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<NcclQueue> queue_;  // shared with transfers
};

}  // namespace cpattn
