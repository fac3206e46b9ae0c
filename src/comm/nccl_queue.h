// NcclQueue: one NCCL communicator, the one stream it is used in, and the thread that watches it.
//
// Hops are done in the order in which they were put, each after what its compute stream was given
// by then. The time of a hop counts from when the communication stream got to it, so that compute
// takes its time; a hop that is not done by then is late, and what NCCL reports is an error at
// once. Either ends the communicator: it is aborted, so that streams drain (their contents are of
// no use), and everything throws the same CommError from then on.
//
// Hops that are put while a stream is in capture become part of its graph. They are not watched:
// the events of a graph cannot be asked. A replay that hangs is found by synchronize(), which then
// does the same; until somebody calls it, or if the program waits in some other way, it hangs. What
// NCCL holds of a communicator that was recorded is given back when the last such graph is gone.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "src/comm/nccl_comm.h"
#include "src/comm/shard_transport.h"
#include "src/device/cuda_device.h"
#include "src/device/cuda_handles.h"

namespace cpattn {

/// One send and one receive. NCCL moves what both ends say, and waits for ever where they differ:
/// sizes must be functions of what the ranks have agreed on.
struct NcclHop {
  int step = 0;  ///< for messages
  int to = 0;
  std::span<const std::byte> out;
  int from = 0;
  std::span<std::byte> in;
  Seconds timeout{60.0};
};

class NcclQueue {
 public:
  NcclQueue(NcclCommunicator communicator, const CudaDevice& device);
  NcclQueue(const NcclQueue&) = delete;
  NcclQueue& operator=(const NcclQueue&) = delete;
  /// Waits for its hops, as long as each may take, and gives them up then. Graphs that were
  /// captured with it must not be launched any more.
  ~NcclQueue();

  /// Connects to these peers with a few bytes, so that no later hop has to, which could not be
  /// captured. Collective; blocks. CommError at the timeout.
  void connect(const std::set<int>& peers, Seconds timeout);

  /// Puts a hop after what `compute` was given so far; `done` is recorded behind it, for the
  /// compute stream to wait for. `ready` and `done` may be used again once it has been.
  /// Errors  the failure there was; CommError, DeviceError when it cannot be put, which ends the
  ///         communicator as well.
  void put(const NcclHop& hop, cudaStream_t compute, const CudaEvent& ready, const CudaEvent& done);

  /// Throws the failure there was, on whichever thread it was found, or what NCCL reports now.
  void rethrow();

  /// ShardTransport::synchronize().
  void synchronize(cudaStream_t stream, Clock::time_point deadline);

 private:
  struct Watched {
    NcclHop hop;
    CudaEvent begun, done;
    std::optional<Clock::time_point> started;  // when it was first seen to have begun
  };
  struct EventPair {
    CudaEvent begun, done;
  };

  // All of these with the lock.
  void rethrow_locked();
  void enqueue(const NcclHop& hop);
  EventPair take_events();
  void look();
  void drop_finished();
  void keep_failure() noexcept;
  std::string describe_late(const Watched& watched, Seconds waited) const;
  std::string describe_late_stream(Seconds waited) const;

  bool is_finished(Seconds waited);
  bool is_stream_done(cudaStream_t stream);
  void drain(cudaStream_t stream);
  void watch();

  const int ordinal_;
  const int rank_;
  std::mutex mutex_;  // of everything below, and of the calls of NCCL
  CudaStream stream_;
  NcclCommunicator communicator_;
  std::deque<Watched> hops_;     // put and not seen to be done, in order
  std::vector<EventPair> free_;  // of hops that are done
  std::set<int> captured_from_;  // peers of hops in graphs
  std::exception_ptr failure_;
  bool is_ending_ = false;
  std::condition_variable changed_;
  std::thread watcher_;
};

}  // namespace cpattn
