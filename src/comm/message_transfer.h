// MessageTransfer: a transfer of host memory as messages of a Communicator, each way a header and a
// payload.
//
// Always four operations, whatever the sizes (empty spans included), so sends and receives match by
// construction (the communicator cuts huge messages). The header carries the number of the
// transfer, whose span it is, its byte count and checksum, and is what lengths are verified by.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "src/comm/communicator.h"
#include "src/comm/transfer.h"
#include "src/device/memory.h"

namespace cpattn {

class MessageTransfer final : public Transfer {
 public:
  MessageTransfer(Communicator& comm, ExchangeKind kind, const TransferOptions& options);
  ~MessageTransfer() override;

  bool is_active() const override { return is_active_; }
  bool is_in_flight() const override;
  void rethrow() const override;
  void start(const TransferEnds& ends, Stream stream) override;
  void poll() noexcept override;
  void wait(Stream stream) override;
  std::uint64_t arrived_checksum() const override { return arrived_checksum_; }
  const TransferStats& stats() const override { return stats_; }

 private:
  bool is_receive_done() const { return is_header_in_ && !payload_in_.is_active(); }
  bool is_send_done() const { return !header_out_.is_active() && !payload_out_.is_active(); }
  bool is_done() const { return is_posted_ && is_receive_done() && is_send_done(); }
  void post_messages();
  void progress();
  void try_progress() noexcept;
  void verify_header();
  void verify_payload() const;
  std::string describe_late() const;
  TransferPlace place() const;

  Communicator& comm_;
  Tag header_tag_, payload_tag_;
  std::string_view what_;
  TransferOptions options_;
  Buffer headers_;  // outgoing, incoming
  TransferEnds ends_;
  bool is_active_ = false;
  bool is_posted_ = false;  // messages given to the transport (later than start() with a delay)
  bool is_header_in_ = false;
  Clock::time_point post_at_{};
  Clock::time_point next_poll_{};
  Pending header_in_, payload_in_, header_out_, payload_out_;
  std::uint64_t arrived_checksum_ = 0;
  std::exception_ptr failure_;
  TransferStats stats_;
};

}  // namespace cpattn
