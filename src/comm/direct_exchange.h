// DirectExchange: in every step each rank sends one span straight to one rank and gets one straight
// from one rank (the destinations of a step are a permutation).
//
// A step's span is written into outgoing(), leaves with post(), and travels while the next step's
// is written into the other of two buffers; wait() ends the transfer before the next post(). What
// arrives lies in one receive buffer and is used before the next post(). It knows bytes, not what
// they mean; lengths come from the caller on both ends and are verified by headers (transfer.h).
// After a CommError it throws it again on every further post() or wait().
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "src/comm/communicator.h"
#include "src/comm/transfer.h"
#include "src/device/memory.h"

namespace cpattn {

/// One step of this rank.
struct DirectHop {
  int step = 0;  ///< for messages
  int to = 0;
  std::size_t bytes_out = 0;
  int from = 0;
  std::size_t bytes_in = 0;
};

class DirectExchange {
 public:
  /// The longest spans of any hop, out and in. Allocates two send buffers and one to receive.
  DirectExchange(ShardTransport& transport, std::size_t max_bytes_out, std::size_t max_bytes_in,
                 const TransferOptions& options);
  DirectExchange(const DirectExchange&) = delete;
  DirectExchange& operator=(const DirectExchange&) = delete;
  ~DirectExchange();

  /// Where the next span to leave is written; not what is in flight.
  std::span<std::byte> outgoing() const { return out_[next_out_].bytes(); }
  /// Where outgoing() of the n-th post() after reset(), and incoming(), will be in every pass.
  std::byte* outgoing_at(int post) const { return out_[post % 2].data(); }
  const std::byte* incoming_at() const { return in_.data(); }
  /// Back to the first send buffer. InternalError while a transfer is active.
  void reset();

  /// What the last wait() brought.
  std::span<const std::byte> incoming() const { return in_.bytes().first(bytes_in_); }

  /// Sends the first bytes_out bytes of outgoing(), which then is the other buffer. InvalidArgument
  /// for a span longer than the longest; InternalError for a post() before the last one's wait().
  void post(const DirectHop& hop, Stream stream = {});
  bool is_active() const { return transfer_->is_active(); }
  /// Throws again what an earlier hop failed with.
  void rethrow() const { transfer_->rethrow(); }
  /// As RingExchange's.
  void poll() noexcept { transfer_->poll(); }
  void wait(Stream stream = {}) { transfer_->wait(stream); }

  const TransferStats& stats() const { return transfer_->stats(); }

  /// Bytes of all buffers; what a plan accounts.
  static std::size_t workspace_bytes(std::size_t max_bytes_out, std::size_t max_bytes_in) {
    return 2 * max_bytes_out + max_bytes_in;
  }

 private:
  Communicator& comm_;
  Buffer out_[2];
  Buffer in_;
  int next_out_ = 0;
  std::size_t bytes_in_ = 0;
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace cpattn
