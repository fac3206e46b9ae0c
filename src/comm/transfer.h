// Transfer: one span out and one span in: what an exchange does in one step, whatever moves the
// bytes.
//
// On the CPU wait() blocks until the bytes are there; on a GPU start() and wait() put the transfer
// into the order of a stream and return at once. An error seen by poll() is kept and thrown by
// wait(), and by every call after it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <span>
#include <string_view>

#include "src/comm/communicator.h"
#include "src/device/device.h"

namespace cpattn {

/// 64 bits that change when any single word of `bytes` does.
std::uint64_t checksum_of(std::span<const std::byte> bytes);

/// How long a test's seed delays this rank's transfer of a step: pseudo-random 0..2 ms; 0 without
/// a seed.
std::chrono::microseconds transfer_delay(std::uint64_t delay_seed, int rank, int step);

struct TransferStats {
  std::int64_t hops = 0;             ///< transfers completed
  std::int64_t messages_posted = 0;  ///< sends + receives, equal on every rank
  std::size_t bytes_sent = 0;        ///< payload bytes
  double exposed_seconds = 0.0;      ///< host time inside wait(): not hidden behind compute
};

/// Who gets what from whom. The bytes stay untouched until wait() returned (on a GPU: until the
/// stream is past it).
struct TransferEnds {
  int step = 0;  ///< for messages
  int to = 0;
  int subject_out = 0;  ///< the rank whose span `out` is
  std::span<const std::byte> out;
  /// Of `out`, as its owner computed it; none: the transfer computes it where the bytes are seen.
  std::optional<std::uint64_t> checksum_out = {};
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
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer() = default;

  virtual bool is_active() const = 0;  ///< between start() and the end of wait()
  /// Something may still read or write the spans, though nobody will wait for it any more: their
  /// owner hands them to Communicator::keep_until_end() instead of freeing them.
  virtual bool is_in_flight() const = 0;
  /// Throws the error that was kept, if there is one.
  virtual void rethrow() const = 0;

  /// Both spans are ready in the order of `stream`. InternalError while another one is active.
  virtual void start(const TransferEnds& ends, Stream stream) = 0;
  /// Lets the transport make progress. Cheap: looks at the clock and acts every 50 us.
  virtual void poll() noexcept = 0;
  /// Work that is given to `stream` afterwards finds both directions done. CommError at the
  /// deadline and for whatever is not as expected, on a GPU as soon as the host learns of it.
  virtual void wait(Stream stream) = 0;

  /// What the sender computed over the last payload that arrived.
  virtual std::uint64_t arrived_checksum() const = 0;
  virtual const TransferStats& stats() const = 0;
};

}  // namespace cpattn
