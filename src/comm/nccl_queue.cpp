#include "src/comm/nccl_queue.h"

#include <cmath>  // std::round
#include <utility>

namespace cpattn {
namespace {

constexpr std::chrono::milliseconds kWatchPause{5};
constexpr std::chrono::microseconds kPollPause{50};
/// For streams to leave the transfers of an aborted communicator.
constexpr Seconds kDrainTime{1.0};

/// One group of NCCL; ended also when a call in it fails, since the next would be inside it.
template <class Calls>
ncclResult_t in_group(const Calls& calls) {
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  result = calls();
  const ncclResult_t ended = ncclGroupEnd();
  return result != ncclSuccess ? result : ended;
}

CudaStream make_stream_of(int ordinal) {
  const DeviceGuard guard(ordinal);
  return make_cuda_stream(StreamPriority::high);
}

}  // namespace

NcclQueue::NcclQueue(NcclCommunicator communicator, const CudaDevice& device)
    : ordinal_(device.ordinal()),
      rank_(communicator.rank()),
      stream_(make_stream_of(ordinal_)),
      communicator_(std::move(communicator)) {
  watcher_ = std::thread([this] { watch(); });
}

NcclQueue::~NcclQueue() {
  const Clock::time_point begin = Clock::now();
  while (!is_finished(Clock::now() - begin)) std::this_thread::sleep_for(kPollPause);
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  watcher_.join();
}

bool NcclQueue::is_finished(Seconds waited) {
  const std::lock_guard lock(mutex_);
  try {
    if (!failure_) look();
  } catch (...) {
    keep_failure();
  }
  if (failure_ || hops_.empty()) return true;
  // One that its own stream never gets to is never late.
  if (waited < 2 * hops_.front().hop.timeout) return false;
  communicator_.abort();
  return true;
}

void NcclQueue::connect(const std::set<int>& peers, Seconds timeout) {
  if (peers.empty()) return;
  constexpr std::size_t kBytes = 16;
  const Clock::time_point deadline = deadline_after(timeout);
  const DeviceGuard guard(ordinal_);
  void* memory = nullptr;
  cuda_check(cudaMalloc(&memory, 2 * kBytes * peers.size()), "memory to connect NCCL peers");
  const CudaHandle<void*, cudaFree> owner(memory);
  {
    const std::lock_guard lock(mutex_);
    rethrow_locked();
    try {
      auto* at = static_cast<std::byte*>(memory);
      ncclComm_t comm = communicator_.handle();
      const ncclResult_t result = in_group([&] {
        ncclResult_t error = ncclSuccess;
        for (const int peer : peers) {
          if (error == ncclSuccess)
            error = ncclSend(at, kBytes, ncclInt8, peer, comm, stream_.get());
          if (error == ncclSuccess)
            error = ncclRecv(at + kBytes, kBytes, ncclInt8, peer, comm, stream_.get());
          at += 2 * kBytes;
        }
        return error;
      });
      if (result != ncclInProgress) nccl_check(result, rank_, "connecting NCCL peers", comm);
      communicator_.settle(deadline, "connecting NCCL peers");
    } catch (...) {
      keep_failure();
      drain(stream_.get());  // it may have begun, and the memory is about to go
      throw;
    }
  }
  synchronize(stream_.get(), deadline);
}

void NcclQueue::put(const NcclHop& hop, cudaStream_t compute, const CudaEvent& ready,
                    const CudaEvent& done) {
  const DeviceGuard guard(ordinal_);
  const std::lock_guard lock(mutex_);
  rethrow_locked();
  try {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(compute, &capture), "cudaStreamIsCapturing");
    order_streams(compute, ready, stream_.get());
    if (capture != cudaStreamCaptureStatusNone) {
      communicator_.note_capture();
      captured_from_.insert(hop.from);
      enqueue(hop);
    } else {
      drop_finished();
      EventPair events = take_events();
      cuda_check(cudaEventRecord(events.begun.get(), stream_.get()), "cudaEventRecord");
      enqueue(hop);
      cuda_check(cudaEventRecord(events.done.get(), stream_.get()), "cudaEventRecord");
      hops_.push_back({hop, std::move(events.begun), std::move(events.done), {}});
      changed_.notify_one();
    }
    cuda_check(cudaEventRecord(done.get(), stream_.get()), "cudaEventRecord");
  } catch (...) {
    keep_failure();
    throw;
  }
}

void NcclQueue::enqueue(const NcclHop& hop) {
  const std::string_view what = "NCCL transfer";
  ncclComm_t comm = communicator_.handle();
  const ncclResult_t result = in_group([&] {
    const ncclResult_t error =
        ncclSend(hop.out.data(), hop.out.size(), ncclInt8, hop.to, comm, stream_.get());
    return error != ncclSuccess
               ? error
               : ncclRecv(hop.in.data(), hop.in.size(), ncclInt8, hop.from, comm, stream_.get());
  });
  if (result == ncclInProgress) return communicator_.settle(deadline_after(hop.timeout), what);
  nccl_check(result, rank_, detail::concat("step ", hop.step, ": ", what), comm);
}

NcclQueue::EventPair NcclQueue::take_events() {
  if (free_.empty()) return {make_cuda_event(), make_cuda_event()};
  EventPair events = std::move(free_.back());
  free_.pop_back();
  return events;
}

void NcclQueue::drop_finished() {
  const CaptureBystander bystander;
  while (!hops_.empty()) {
    Watched& first = hops_.front();
    if (!is_cuda_done(cudaEventQuery(first.done.get()), "NCCL transfer")) return;
    free_.push_back({std::move(first.begun), std::move(first.done)});
    hops_.pop_front();
  }
}

// Only the first hop can be late: the others have not begun.
void NcclQueue::look() {
  communicator_.check();
  drop_finished();
  if (hops_.empty()) return;
  const CaptureBystander bystander;
  Watched& first = hops_.front();
  const Clock::time_point now = Clock::now();
  if (!first.started) {
    if (is_cuda_done(cudaEventQuery(first.begun.get()), "NCCL transfer")) first.started = now;
    return;
  }
  const Seconds waited = now - *first.started;
  require<CommError>(waited < first.hop.timeout, describe_late(first, first.hop.timeout));
}

void NcclQueue::watch() {
  cudaSetDevice(ordinal_);
  std::unique_lock lock(mutex_);
  while (!is_ending_) {
    if (failure_ || hops_.empty()) {
      changed_.wait(lock);
      continue;
    }
    try {
      look();
    } catch (...) {
      keep_failure();
    }
    lock.unlock();
    std::this_thread::sleep_for(kWatchPause);
    lock.lock();
  }
}

void NcclQueue::keep_failure() noexcept {
  if (!failure_) failure_ = std::current_exception();
  communicator_.abort();
}

void NcclQueue::rethrow_locked() {
  if (failure_) std::rethrow_exception(failure_);
  try {
    communicator_.check();
  } catch (...) {
    keep_failure();
    throw;
  }
}

void NcclQueue::rethrow() {
  const std::lock_guard lock(mutex_);
  rethrow_locked();
}

std::string NcclQueue::describe_late(const Watched& watched, Seconds waited) const {
  const NcclHop& hop = watched.hop;
  const std::string text = late_text(
      rank_, {.what = "NCCL transfer", .step = hop.step, .peer = hop.from, .bytes = hop.in.size()},
      waited);
  if (hop.to == hop.from) return text;
  return detail::concat(text, ", or rank ", hop.to, " did not take ", hop.out.size(), " bytes");
}

std::string NcclQueue::describe_late_stream(Seconds waited) const {
  if (!hops_.empty() && hops_.front().started) return describe_late(hops_.front(), waited);
  std::string text = detail::concat("rank ", rank_, ": stream: not done within ",
                                    std::round(waited.count() * 1e3) / 1e3, " s");
  if (captured_from_.empty()) return text;
  text += "; graphs that it may be replaying receive from rank";
  for (const int peer : captured_from_) text += detail::concat(" ", peer);
  return text;
}

bool NcclQueue::is_stream_done(cudaStream_t stream) {
  const CaptureBystander bystander;
  return is_cuda_done(cudaStreamQuery(stream), "cudaStreamQuery");
}

void NcclQueue::synchronize(cudaStream_t stream, Clock::time_point deadline) {
  const DeviceGuard guard(ordinal_);
  const Clock::time_point begin = Clock::now();
  while (!is_stream_done(stream)) {
    {
      const std::lock_guard lock(mutex_);
      try {
        rethrow_locked();
        require<CommError>(Clock::now() < deadline, describe_late_stream(deadline - begin));
      } catch (...) {
        keep_failure();
        break;
      }
    }
    std::this_thread::sleep_for(kPollPause);
  }
  drain(stream);
  rethrow();
}

void NcclQueue::drain(cudaStream_t stream) {
  const Clock::time_point end = deadline_after(kDrainTime);
  while (!is_stream_done(stream) && Clock::now() < end) std::this_thread::sleep_for(kPollPause);
}

}  // namespace cpattn
