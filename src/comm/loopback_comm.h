// P ranks as threads of one process, for tests and debuggers.
//
// A message is copied when it is posted and copied out by its receiver, so no rank ever touches
// another rank's memory; a send is complete once the receiver took it, as in a transport without
// buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "src/comm/communicator.h"

namespace cpattn {

struct LoopbackOptions {
  /// Not 0: every message is held back for a pseudo-random 0..1 ms, so that channels overtake each
  /// other (each stays FIFO), and bytes that changed between isend() and its completion are an
  /// InternalError.
  std::uint64_t shuffle_seed = 0;
  /// run() throws InternalError when all ranks returned but a message was never received.
  bool must_receive_all = true;
};

class LoopbackHub;  // what the ranks share

class LoopbackWorld {
 public:
  /// InvalidArgument unless size > 0.
  explicit LoopbackWorld(int size, const LoopbackOptions& options = {});
  ~LoopbackWorld();
  LoopbackWorld(const LoopbackWorld&) = delete;
  LoopbackWorld& operator=(const LoopbackWorld&) = delete;

  /// Runs `body` once per rank, each in its own thread, and joins them. When a rank throws, the
  /// others' next test() throws CommError with its text, and run() rethrows the exception that came
  /// first (never one that only reports another rank's). Can be called again, also after a failure.
  void run(const std::function<void(Communicator&)>& body);

 private:
  std::unique_ptr<LoopbackHub> hub_;
};

}  // namespace cpattn
