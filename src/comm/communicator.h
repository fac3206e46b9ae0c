// Communicator: ranks as endpoints of byte messages, whatever the transport.
//
// Policy: bytes move, nothing is added up here (a library reduction would decide order and
// precision for us). Every wait has a deadline that ends in CommError; after a CommError the
// communicator must not be used again. A communicator belongs to one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/comm/shard_transport.h"
#include "src/device/memory.h"

namespace cpattn {

/// The moment a wait gives up.
inline Clock::time_point deadline_after(Seconds timeout) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

/// Message kinds; a (peer, tag) pair is a FIFO channel. Kept below 2^15, the least a transport must
/// offer.
enum class Tag : int {
  ring_header = 1,
  ring_payload = 2,
  gather = 3,
  test = 4,
  direct_header = 5,
  direct_payload = 6,
  ordered_sum = 7
};

/// A posted message that has not been seen to complete. Move it, test it, never drop it while
/// active.
struct Pending {
  std::int64_t id = -1;
  bool is_active() const { return id >= 0; }
};

/// What a wait is about, for the message of its CommError. `what` must outlive the wait.
struct WaitContext {
  std::string_view what;        ///< "ring hop", "all_gather", ...
  int step = -1;                ///< step of the schedule, -1 when none
  int peer = -1;                ///< rank waited for, -1 when none in particular
  std::size_t bytes = 0;        ///< bytes of the message waited for
  bool is_send = false;         ///< waiting for the peer to take our bytes, not for its own
  Clock::time_point started{};  ///< when the operation as a whole began; default: with the wait
};

/// The text of the CommError at a deadline, e.g.
/// "rank 2: step 1: nothing from rank 1 within 5 s (8388608 bytes expected)"; without a step it
/// names `context.what` instead. `waited` is rounded to milliseconds.
std::string late_text(int rank, const WaitContext& context, Seconds waited);

class Communicator : public ShardTransport {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Longest single message on the wire, longer ones are cut; 0 for a transport that cuts none.
  virtual std::size_t max_message_bytes() const { return 0; }

  /// Whether isend() and irecv() also take memory of a GPU.
  virtual bool takes_device_memory() const { return false; }

  /// Posts a message. The bytes must stay untouched until test() returned true. Zero bytes are a
  /// message too. Messages of any size are accepted; the transport cuts them as it needs (64-bit
  /// sizes throughout). Errors: InvalidArgument for a peer outside [0, size()), CommError from the
  /// transport.
  [[nodiscard]] virtual Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) = 0;
  [[nodiscard]] virtual Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) = 0;

  /// Makes progress on all traffic; true once this message is complete (`pending` becomes
  /// inactive). A length that differs from what was posted is a CommError.
  virtual bool test(Pending& pending) = 0;

  /// Waits for one message: test() in a loop that gives the processor away when there is nothing to
  /// do. CommError at `deadline`, naming rank, step, peer and bytes from `context`.
  void wait(Pending& pending, Clock::time_point deadline, const WaitContext& context);

  /// Everybody's bytes, by rank; sizes may differ. Collective. Built on isend/irecv, so it keeps
  /// the deadline; P - 1 messages each way, meant for small things. CommError too when a peer is
  /// in a collective with another `what`.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 Clock::time_point deadline, std::string_view what);

  /// Like all_gather, but only `root` receives (the others get an empty vector).
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine, int root,
                                             Clock::time_point deadline, std::string_view what);

  void barrier(Clock::time_point deadline, std::string_view what);

  /// Ends all ranks as soon as the transport can, with this exit code. Called by the roof after a
  /// failure; on loopback it makes every other rank's next test() throw CommError with `reason`.
  virtual void abort(int exit_code, std::string_view reason) noexcept = 0;

  /// As the transport of shards in host memory.
  Communicator& control() override { return *this; }
  Device& device() override { return cpu_; }
  std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                          const TransferOptions& options) override;
  void synchronize(Stream, Clock::time_point) override {}
  bool can_verify_checksums() const override { return true; }

  /// After a failure: keeps memory that an unfinished message may still touch until the
  /// communicator itself ends.
  void keep_until_end(Buffer bytes) noexcept { kept_.push_back(std::move(bytes)); }

 protected:
  /// InvalidArgument when there is no such rank.
  void check_peer(int peer) const;

  /// For a transport that ends with messages still posted: lets go of the kept memory without
  /// freeing it. Only a failure leads here, so the process is about to end.
  void leak_kept_memory() noexcept;

 private:
  struct Collective;
  CpuDevice cpu_;
  std::vector<Buffer> kept_;
};

/// Compares a text of "key=value" lines over all ranks. Collective, before the first exchange of
/// tensors. Throws InvalidArgument on *every* rank, with the same text, when any two differ, naming
/// the first differing keys with ranks and values: "sharding differs between ranks: rank 0 has
/// zigzag, rank 1 has contiguous". A key that a rank lacks has the value "(absent)".
void agree(Communicator& comm, std::string_view lines, Clock::time_point deadline);

/// Everybody hears what anybody refuses: a rank that threw alone would be a hang for the others.
/// Collective; `mine` is what this rank refuses, "" for nothing. Throws InvalidArgument on every
/// rank, with the same text ("rank 1: ...; ranks 2, 3: ..."), unless all are empty. Allocates what
/// one all_gather of these texts does: a few small blocks per rank, whatever the size of the
/// problem.
void refuse_together(Communicator& comm, std::string_view mine, Clock::time_point deadline,
                     std::string_view what);

}  // namespace cpattn
