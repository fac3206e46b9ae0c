// How the sends and receives of a group progress on a stream's thread.
#include <signal.h>

#include <cerrno>

#include "tests/support/cuda/fake_nccl_comm.h"
#include "tests/support/cuda/fake_stream.h"

namespace cpattn::fake_nccl {
namespace {

constexpr unsigned kLook_ms = 20;  ///< how often a sleeper looks whether its peers are still there

/// A transfer under way: first its size goes over, then its bytes.
struct Progress {
  const Transfer* transfer = nullptr;
  std::uint64_t announced = 0;
  std::size_t header_done = 0;
  std::size_t bytes_done = 0;

  bool is_done() const { return header_done == sizeof(announced) && bytes_done == transfer->bytes; }
};

/// Whether bytes moved.
bool advance_send(Communicator& communicator, Progress& progress) {
  const Transfer& it = *progress.transfer;
  Channel& channel = communicator.segment().channels[communicator.rank][it.peer];
  std::size_t moved = 0;
  if (progress.header_done < sizeof(progress.announced)) {
    progress.announced = it.bytes;
    const auto* header = reinterpret_cast<const std::byte*>(&progress.announced);
    moved = channel.write(header + progress.header_done,
                          sizeof(progress.announced) - progress.header_done);
    progress.header_done += moved;
  }
  if (progress.header_done == sizeof(progress.announced)) {
    const std::size_t bytes =
        channel.write(it.data + progress.bytes_done, it.bytes - progress.bytes_done);
    progress.bytes_done += bytes;
    moved += bytes;
  }
  return moved > 0;
}

bool advance_receive(Communicator& communicator, Progress& progress) {
  const Transfer& it = *progress.transfer;
  Channel& channel = communicator.segment().channels[it.peer][communicator.rank];
  std::size_t moved = 0;
  if (progress.header_done < sizeof(progress.announced)) {
    auto* header = reinterpret_cast<std::byte*>(&progress.announced);
    moved = channel.read(header + progress.header_done,
                         sizeof(progress.announced) - progress.header_done);
    progress.header_done += moved;
    if (progress.header_done < sizeof(progress.announced)) return moved > 0;
    if (progress.announced != it.bytes) {
      communicator.raise(ncclInvalidUsage, detail::concat("rank ", communicator.rank, " receives ",
                                                          it.bytes, " bytes from rank ", it.peer,
                                                          ", which sends ", progress.announced));
      return false;
    }
  }
  const std::size_t bytes =
      channel.read(it.data + progress.bytes_done, it.bytes - progress.bytes_done);
  progress.bytes_done += bytes;
  return moved + bytes > 0;
}

bool is_lost(RankSlot& peer) {
  const Presence presence = peer.presence.load(std::memory_order_relaxed);
  if (presence != Presence::attached) return true;
  return kill(peer.process.load(std::memory_order_relaxed), 0) != 0 && errno == ESRCH;
}

void look_for_lost_peers(Communicator& communicator, const std::vector<Progress>& transfers) {
  for (const Progress& progress : transfers) {
    const int peer = progress.transfer->peer;
    if (!progress.is_done() && is_lost(communicator.segment().ranks[peer])) {
      communicator.raise(ncclRemoteError,
                         detail::concat("rank ", communicator.rank, " has lost rank ", peer));
    }
  }
}

/// One attempt at every transfer that is the first unfinished one of its direction and peer.
/// Whether bytes moved.
bool advance_all(Communicator& communicator, std::vector<Progress>& transfers) {
  bool is_taken[2][kMaxRanks] = {};
  bool has_moved = false;
  for (Progress& progress : transfers) {
    const Transfer& it = *progress.transfer;
    if (progress.is_done() || is_taken[it.is_send][it.peer]) continue;
    const bool moved =
        it.is_send ? advance_send(communicator, progress) : advance_receive(communicator, progress);
    if (moved) communicator.segment().ring(it.peer);
    has_moved = has_moved || moved;
    is_taken[it.is_send][it.peer] = !progress.is_done();
  }
  return has_moved;
}

bool is_all_done(const std::vector<Progress>& transfers) {
  for (const Progress& progress : transfers) {
    if (!progress.is_done()) return false;
  }
  return true;
}

bool is_broken(const Communicator& communicator) {
  return communicator.async_error.load(std::memory_order_relaxed) != ncclSuccess;
}

/// A broken communicator keeps its stream.
void wait_for_abort(Communicator& communicator) {
  while (!communicator.is_aborted.load(std::memory_order_relaxed)) {
    const std::uint32_t seen = communicator.slot().bell.load(std::memory_order_relaxed);
    wait_for_bell(communicator, seen);
  }
}

}  // namespace

void wait_for_bell(Communicator& communicator, std::uint32_t seen) {
  fake_cuda::sleep_while_shared(communicator.slot().bell, seen, kLook_ms);
}

cudaError_t run_batch(Communicator& communicator, const std::vector<Transfer>& transfers) {
  if (communicator.is_aborted.load(std::memory_order_relaxed)) return cudaSuccess;
  if (communicator.is_destroyed.load(std::memory_order_relaxed)) {
    return fake_cuda::complain(cudaErrorIllegalAddress, "a transfer of a destroyed communicator");
  }
  if (communicator.is_busy.exchange(true, std::memory_order_relaxed)) {
    communicator.raise(ncclInvalidUsage, "two streams use one communicator at once");
    wait_for_abort(communicator);
    return cudaSuccess;
  }
  std::vector<Progress> under_way;
  for (const Transfer& transfer : transfers) under_way.push_back({.transfer = &transfer});
  while (!is_all_done(under_way)) {
    const std::uint32_t seen = communicator.slot().bell.load(std::memory_order_relaxed);
    if (is_broken(communicator)) {
      wait_for_abort(communicator);
      break;
    }
    if (advance_all(communicator, under_way)) continue;
    if (communicator.is_aborted.load(std::memory_order_relaxed)) break;
    if (fabric().notices_lost_peers) look_for_lost_peers(communicator, under_way);
    wait_for_bell(communicator, seen);
  }
  communicator.is_busy.store(false, std::memory_order_relaxed);
  return cudaSuccess;
}

namespace {

/// A batch that runs any number of times: counts for as long as a graph has it.
struct Recorded {
  explicit Recorded(const CommunicatorRef& of) : communicator(of) {
    communicator->num_recorded.fetch_add(1, std::memory_order_relaxed);
  }
  ~Recorded() { communicator->num_recorded.fetch_sub(1, std::memory_order_relaxed); }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  const CommunicatorRef communicator;
};

cudaError_t record(const CommunicatorRef& communicator, const Batch& batch) {
  return fake_cuda::enqueue(
      *batch.stream, "ncclGroup",
      [recorded = std::make_shared<Recorded>(communicator), transfers = batch.transfers] {
        return run_batch(*recorded->communicator, transfers);
      });
}

cudaError_t enqueue_once(const CommunicatorRef& communicator, const Batch& batch) {
  communicator->num_queued.fetch_add(1, std::memory_order_relaxed);
  const cudaError_t error =
      fake_cuda::enqueue(*batch.stream, "ncclGroup", [communicator, transfers = batch.transfers] {
        const cudaError_t result = run_batch(*communicator, transfers);
        communicator->num_queued.fetch_sub(1, std::memory_order_relaxed);
        return result;
      });
  if (error != cudaSuccess) communicator->num_queued.fetch_sub(1, std::memory_order_relaxed);
  return error;
}

}  // namespace

ncclResult_t enqueue_batch(const CommunicatorRef& communicator, const Batch& batch) {
  const cudaError_t error = batch.stream->is_capturing() ? record(communicator, batch)
                                                         : enqueue_once(communicator, batch);
  return error == cudaSuccess ? ncclSuccess
                              : refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
}

}  // namespace cpattn::fake_nccl
