// Transfer: one span out and one span in, each a header and a payload: what an exchange does in one
// step.
//
// Always four operations, whatever the sizes (empty spans included), so sends and receives match by
// construction (the transport cuts huge messages). The header carries the number of the transfer,
// whose span it is, its byte count and checksum, and is what lengths are verified by. An error seen
// by poll() is kept and thrown by wait(), and by every call after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <ostream>
#include <span>
#include <string>

#include "src/comm/communicator.h"
#include "src/device/memory.h"

namespace cpattn {

/// 64 bits that change when any single word of `bytes` does.
std::uint64_t checksum_of(std::span<const std::byte> bytes);

struct TransferOptions {
  Seconds timeout{60.0};  ///< per transfer, counted from wait(), so that compute takes its time
  bool verify_checksum = false;  ///< 64-bit checksum of every payload, checked on arrival
  std::uint64_t delay_seed =
      0;  ///< not 0: delay each transfer by a pseudo-random 0..2 ms per (seed, rank, step); tests
};

struct TransferStats {
  std::int64_t hops = 0;             ///< transfers completed
  std::int64_t messages_posted = 0;  ///< sends + receives, equal on every rank
  std::size_t bytes_sent = 0;        ///< payload bytes
  double exposed_seconds = 0.0;      ///< time spent inside wait(): not hidden behind compute
};

/// Who gets what from whom. The bytes stay untouched until wait() returned; when a failure leaves
/// messages posted, their owner hands them to Communicator::keep_until_end().
struct TransferEnds {
  int step = 0;  ///< for messages
  int to = 0;
  int subject_out = 0;  ///< the rank whose span `out` is
  std::span<const std::byte> out;
  std::uint64_t checksum_out = 0;  ///< of `out`, when checksums are verified
  int from = 0;
  int subject_in = 0;
  std::span<std::byte> in;
};

/// "rank 2: step 1: " at the head of a message: two numbers until there is something to say, so
/// that a check that passes allocates nothing.
struct TransferPlace {
  int rank = 0;
  int step = 0;
  friend std::ostream& operator<<(std::ostream& text, const TransferPlace& place) {
    return text << "rank " << place.rank << ": step " << place.step << ": ";
  }
};

class Transfer {
 public:
  /// `what` must outlive this.
  Transfer(Communicator& comm, Tag header, Tag payload, std::string_view what,
           const TransferOptions& options);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer();

  bool is_active() const { return is_active_; }  ///< between start() and the end of wait()
  /// Messages are posted that the transport may still read or write.
  bool is_in_flight() const;
  /// Throws the error that was kept, if there is one.
  void rethrow() const;

  /// InternalError while another one is active.
  void start(const TransferEnds& ends);
  /// Lets the transport make progress. Cheap: looks at the clock and acts every 50 us.
  void poll() noexcept;
  /// Blocks until both directions are done and verified. CommError at the deadline and for whatever
  /// is not as expected.
  void wait();

  /// What the sender computed over the last payload that arrived.
  std::uint64_t arrived_checksum() const { return arrived_checksum_; }
  const TransferStats& stats() const { return stats_; }

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
