// A rank's end of a communicator, and how the calls of the fake NCCL answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "src/base/error.h"
#include "tests/support/cuda/fake_nccl_segment.h"
#include "tests/support/cuda/fake_signal.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

namespace cpattn::fake_nccl {

/// One send or receive of a group.
struct Transfer {
  bool is_send = false;
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// The transfers of one group with one communicator.
struct Batch {
  fake_cuda::Stream* stream = nullptr;
  std::vector<Transfer> transfers;
};

/// What queued work shares with the handle, and keeps after the handle's end.
struct Communicator : fake_cuda::Shared {
  ~Communicator() override;

  std::string name;
  int rank = 0;
  int num_ranks = 0;
  int device = 0;
  bool is_blocking = true;
  std::shared_ptr<Mapping> mapping;  ///< null before the job that attaches has got there
  std::thread job;                   ///< initialisation, a split or an end under way

  std::atomic<int> job_result{ncclInProgress};  ///< of the latest
  std::atomic<int> polls_left{0};               ///< answers that are "in progress" whatever is true
  std::atomic<int> async_error{ncclSuccess};
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> is_destroyed{false};
  std::atomic<bool> is_finalized{false};
  std::atomic<std::int64_t> num_queued{0};    ///< batches that streams have not got through
  std::atomic<bool> is_busy{false};           ///< with a batch
  std::atomic<std::int64_t> num_recorded{0};  ///< batches in captures and graphs that are not gone

  // Of the host's threads, one at a time, as NCCL demands.
  std::set<int> connected;      ///< peers
  std::vector<Batch> deferred;  ///< batches of a group that is in progress
  std::uint32_t num_splits = 0;
  std::set<void*> registrations;

  Segment& segment() { return mapping->segment(); }
  RankSlot& slot() { return segment().ranks[rank]; }
  /// Whether other ranks are of this process, too.
  bool has_neighbours();
  std::string text();
  void set_text(const std::string& text);
  /// An asynchronous error; the first one stays.
  void raise(ncclResult_t error, const std::string& text);

 private:
  std::mutex text_mutex_;  ///< where something has gone wrong
  std::string text_;
};

using CommunicatorRef = fake_cuda::Ref<Communicator>;

/// Sleeps until the rank's bell is rung after `seen`, or a little while.
void wait_for_bell(Communicator& communicator, std::uint32_t seen);

/// On a stream's thread: until all transfers are done, or the communicator is aborted.
cudaError_t run_batch(Communicator& communicator, const std::vector<Transfer>& transfers);
/// Puts a batch into its stream, or into the graph that is captured from it.
ncclResult_t enqueue_batch(const CommunicatorRef& communicator, const Batch& batch);

/// What the segment tells of all ranks, waits until all have come. For a job.
ncclResult_t attach(Communicator& communicator);
/// Finds the ranks that post the same color, and attaches `child` to them; null: with no color.
ncclResult_t split(Communicator& parent, int color, int key, Communicator* child);

/// The text for ncclGetLastError of the calling thread.
std::string& last_text();
template <class... Parts>
ncclResult_t refuse(ncclResult_t error, const Parts&... parts) {
  last_text() = detail::concat(parts...);
  return error;
}

/// The communicator of a handle that can be used: initialised, not in progress, not broken.
ncclResult_t find_ready(ncclComm_t handle, const char* api, CommunicatorRef* communicator);
/// The same in any state but destroyed or aborted.
ncclResult_t find_alive(ncclComm_t handle, const char* api, CommunicatorRef* communicator);

/// Where a test asks for it, the call fails.
template <class Function>
ncclResult_t call(fake_cuda::Api& api, Function function) {
  if (const int injected = api.enter(); injected != 0) {
    return refuse(static_cast<ncclResult_t>(injected), "a failure that a test asked for");
  }
  return function();
}

}  // namespace cpattn::fake_nccl

/// The handle: outlives what it stands for, so that its misuse is an answer and not a crash.
struct ncclComm {
  cpattn::fake_nccl::CommunicatorRef communicator;  ///< null once destroyed or aborted
};
