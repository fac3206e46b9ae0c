// ShardTransport: where the shards of a group live and what moves them between its ranks.
//
// Shards in host memory travel as messages of a Communicator, so every Communicator is one. Shards
// in device memory travel by NCCL, or through host memory by messages. Either way a group has one
// Communicator, the control plane, over which its ranks agree and refuse together.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "src/device/device.h"

namespace cpattn {

class Communicator;
class Transfer;

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// Whose transfers: those of a RingExchange or of a DirectExchange, which may be under way
/// together.
enum class ExchangeKind { ring, direct };

struct TransferOptions {
  Seconds timeout{60.0};  ///< per transfer, counted from wait(), so that compute takes its time
  bool verify_checksum = false;  ///< 64-bit checksum of every payload, checked on arrival
  std::uint64_t delay_seed =
      0;  ///< not 0: delay each transfer by a pseudo-random 0..2 ms per (seed, rank, step); tests
};

class ShardTransport {
 public:
  ShardTransport() = default;
  ShardTransport(const ShardTransport&) = delete;
  ShardTransport& operator=(const ShardTransport&) = delete;
  virtual ~ShardTransport() = default;

  virtual std::string_view transport() const = 0;  ///< "loopback", "mpi", "nccl", ...
  virtual Communicator& control() = 0;
  const Communicator& control() const { return const_cast<ShardTransport*>(this)->control(); }
  virtual Device& device() = 0;
  const Device& device() const { return const_cast<ShardTransport*>(this)->device(); }

  /// Collective in the sense that all ranks make the same transfers in the same order.
  virtual std::unique_ptr<Transfer> make_transfer(ExchangeKind kind,
                                                  const TransferOptions& options) = 0;
  /// Blocks the host until all work that was given to `stream` is done; on the CPU it is.
  /// Errors  CommError at the deadline, naming the hop that is late and its peer, after which the
  ///         group is of no more use; DeviceError when the device failed.
  virtual void synchronize(Stream stream, Clock::time_point deadline) = 0;

  /// Whether payloads can be verified by checksums: not where the host does not see them.
  virtual bool can_verify_checksums() const = 0;
  /// Whether transfers on a stream in capture become part of the graph.
  virtual bool can_capture() const { return false; }
};

}  // namespace cpattn
