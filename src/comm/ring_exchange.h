// RingExchange: rotates one byte span per rank around the ring with two slots: post, poll, wait.
//
// Step t: this rank holds the span of `current_owner()` = (rank - t * direction) mod P. post()
// starts sending it, or as much of its beginning as anybody further on wants, to the next rank
// while the previous rank's span arrives in the other slot; wait() ends the hop and swaps the
// slots. After P - 1 hops everyone has seen every span; there may be fewer steps, if the later ones
// have nothing for anybody. post() and wait() at the last step do nothing. A span is received into
// a slot only after that slot's own send was seen complete, so nothing in flight is written. A hop
// is a Transfer (transfer.h). After a CommError the exchange throws it again on every further
// post() or wait().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/transfer.h"
#include "src/device/memory.h"

namespace cpattn {

struct RingOptions {
  int direction = 1;             ///< +1: spans travel to rank + 1; -1: to rank - 1
  Seconds timeout{60.0};         ///< per hop, counted from wait(), so that compute may take longer
  bool verify_checksum = false;  ///< 64-bit checksum of every payload, checked on arrival
  std::uint64_t delay_seed =
      0;  ///< not 0: delay each hop by a pseudo-random 0..2 ms per (seed, rank, step); for tests
};

/// What one rank holds and passes on in one pass, by step: as many steps on every rank, P at most.
struct RingBytes {
  std::vector<std::size_t> held;       ///< of the span worked on; at step 0 this rank's own
  std::vector<std::size_t> passed_on;  ///< of that span, from its start; 0 at the last step
};

/// Every span goes whole to every rank. `span_bytes[r]` is the size of rank r's.
RingBytes whole_spans(std::span<const std::size_t> span_bytes, int rank, int direction);

using RingStats = TransferStats;

class RingExchange {
 public:
  /// What this rank passes on at a step is what the next one holds at the step after it. Allocates
  /// both slots.
  RingExchange(ShardTransport& transport, RingBytes bytes, const RingOptions& options);
  /// whole_spans().
  RingExchange(ShardTransport& transport, const std::vector<std::size_t>& span_bytes,
               const RingOptions& options);
  RingExchange(const RingExchange&) = delete;
  RingExchange& operator=(const RingExchange&) = delete;
  ~RingExchange();

  /// Back to step 0, and to the first slot: every pass has its spans at the same addresses. own()
  /// is then where this rank writes its span before the first post().
  void reset();
  std::span<std::byte> own();

  int step() const;
  int current_owner() const;
  std::span<const std::byte> current() const;

  /// Where the span of a step will be, in every pass: what is computed on can be written down
  /// beforehand.
  const std::byte* at_step(int step) const { return slots_[step % 2].data(); }

  /// Starts the hop out of this step, once `stream` has got so far. Misuse (two posts without a
  /// wait) is an InternalError.
  void post(Stream stream = {});
  /// Lets the transport make progress; call it at least every 50 to 200 us while computing. Cheap
  /// when called more often: it looks at the clock and acts every 50 us. Never throws: an error is
  /// kept and thrown by wait().
  void poll() noexcept;
  /// Ends the hop, verified, and swaps the slots; on the CPU blocks until both directions are done.
  /// CommError at the deadline, on a length, owner or checksum mismatch, and for errors kept by
  /// poll().
  void wait(Stream stream = {});

  const RingStats& stats() const;

  /// Bytes both slots take; what a plan accounts.
  static std::size_t workspace_bytes(const RingBytes& bytes);

 private:
  int last_step() const { return static_cast<int>(bytes_.held.size()) - 1; }
  int owner_at(int step) const;
  TransferPlace place() const;

  Communicator& comm_;
  RingBytes bytes_;
  RingOptions options_;
  Buffer slots_[2];
  int current_slot_ = 0;
  int step_ = 0;
  std::optional<std::uint64_t> current_checksum_;  // of the current span, by its owner; not ours
  std::unique_ptr<Transfer> hop_;
};

}  // namespace cpattn
