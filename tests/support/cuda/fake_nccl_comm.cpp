// The life of a communicator: its functions in NCCL, and their answers to misuse.
#include "tests/support/cuda/fake_nccl_comm.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tests/support/cuda/fake_memory.h"

namespace cpattn::fake_nccl {
namespace {

using fake_cuda::add;
using fake_cuda::Api;
using fake_cuda::counts;
using fake_cuda::current_device;

constexpr std::chrono::microseconds kGlance(100);

Fabric the_fabric;

/// Handles stay, so that their misuse after the end is noticed.
struct Handles {
  std::mutex mutex;
  std::vector<std::unique_ptr<ncclComm>> all;
};

ncclComm_t new_handle(CommunicatorRef communicator) {
  static auto* const handles = new Handles;
  add(counts().communicators, 1);
  const std::lock_guard lock(handles->mutex);
  auto& handle = handles->all.emplace_back(new ncclComm{std::move(communicator)});
  return handle.get();
}

void close(ncclComm_t handle, Presence presence) {
  Communicator& communicator = *handle->communicator;
  // Of a child, the job is its parent's.
  while (communicator.job_result.load(std::memory_order_acquire) == ncclInProgress) {
    std::this_thread::sleep_for(kGlance);
  }
  if (communicator.job.joinable()) communicator.job.join();
  if (communicator.mapping != nullptr) {
    communicator.slot().presence.store(presence, std::memory_order_relaxed);
    communicator.segment().ring_all();
  }
  handle->communicator = {};
  add(counts().communicators, -1);
}

/// After its end: until no graph is left that has recorded a transfer of it.
void wait_for_graphs(const Communicator& communicator) {
  while (communicator.num_recorded.load(std::memory_order_relaxed) > 0) {
    std::this_thread::sleep_for(kGlance);
  }
}

/// Does a job at once, or in a thread of its own while the communicator is in progress.
template <class Job>
ncclResult_t start_job(Communicator& owner, bool is_blocking, Job job) {
  if (owner.job.joinable()) owner.job.join();
  if (is_blocking) {
    const ncclResult_t result = job();
    owner.job_result.store(result, std::memory_order_relaxed);
    if (result != ncclSuccess) owner.set_text(last_text());
    return result;
  }
  owner.job_result.store(ncclInProgress, std::memory_order_relaxed);
  owner.polls_left.store(1, std::memory_order_relaxed);
  owner.job = std::thread([&owner, job] {
    const ncclResult_t result = job();
    if (result != ncclSuccess) owner.set_text(last_text());
    owner.job_result.store(result, std::memory_order_release);
  });
  return ncclInProgress;
}

bool is_blocking(const ncclConfig_t* config, bool otherwise) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise
                                                                        : config->blocking != 0;
}

ncclResult_t check_config(const ncclConfig_t* config) {
  constexpr unsigned kMagic = 0xcafebeef;  // NCCL_CONFIG_INITIALIZER
  if (config == nullptr) return ncclSuccess;
  if (config->magic != kMagic || config->size != sizeof(ncclConfig_t)) {
    return refuse(ncclInvalidArgument, "ncclConfig_t: not begun as NCCL_CONFIG_INITIALIZER");
  }
  const int blocking = config->blocking;
  if (blocking == NCCL_CONFIG_UNDEF_INT || blocking == 0 || blocking == 1) return ncclSuccess;
  return refuse(ncclInvalidArgument, "ncclConfig_t: blocking is ", blocking);
}

ncclResult_t init(ncclComm_t* handle, int num_ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  *handle = nullptr;
  if (const ncclResult_t error = check_config(config); error != ncclSuccess) return error;
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return refuse(ncclInvalidArgument, "rank ", rank, " of ", num_ranks);
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, cudaGetErrorString(cudaPeekAtLastError()));
  }
  const CommunicatorRef communicator(new Communicator);
  communicator->name = id.internal;
  communicator->rank = rank;
  communicator->num_ranks = num_ranks;
  communicator->device = device;
  communicator->is_blocking = is_blocking(config, true);
  *handle = new_handle(communicator);
  const ncclResult_t result = start_job(*communicator, communicator->is_blocking,
                                        [it = communicator.get()] { return attach(*it); });
  if (result != ncclSuccess && result != ncclInProgress) {
    close(*handle, Presence::left);
    *handle = nullptr;
  }
  return result;
}

ncclResult_t start_split(Communicator& parent, int color, int key, ncclComm_t* handle,
                         const ncclConfig_t* config) {
  *handle = nullptr;
  if (const ncclResult_t wrong = check_config(config); wrong != ncclSuccess) return wrong;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
    return refuse(ncclInvalidArgument, "ncclCommSplit: color ", color);
  }
  CommunicatorRef child;
  if (color != NCCL_SPLIT_NOCOLOR) {
    child = CommunicatorRef(new Communicator);
    child->device = parent.device;
    child->is_blocking = is_blocking(config, parent.is_blocking);
    child->polls_left.store(child->is_blocking ? 0 : 1, std::memory_order_relaxed);
    *handle = new_handle(child);
  }
  const ncclResult_t error = start_job(parent, parent.is_blocking, [&parent, child, color, key] {
    const ncclResult_t result = split(parent, color, key, child.get());
    if (child) {
      if (result != ncclSuccess) child->set_text(last_text());
      child->job_result.store(result, std::memory_order_release);
    }
    return result;
  });
  if (error != ncclSuccess && error != ncclInProgress && child) {
    close(*handle, Presence::left);
    *handle = nullptr;
  }
  return error;
}

/// Until streams have got through all batches.
ncclResult_t drain(Communicator& communicator) {
  while (communicator.num_queued.load(std::memory_order_relaxed) > 0) {
    if (communicator.is_aborted.load(std::memory_order_relaxed)) return ncclInternalError;
    std::this_thread::sleep_for(kGlance);
  }
  return ncclSuccess;
}

/// What a poll finds; begins the transfers that were put off.
ncclResult_t poll(const CommunicatorRef& communicator) {
  const int async = communicator->async_error.load(std::memory_order_relaxed);
  if (async != ncclSuccess) return static_cast<ncclResult_t>(async);
  const int job = communicator->job_result.load(std::memory_order_acquire);
  const bool is_put_off = communicator->polls_left.load(std::memory_order_relaxed) > 0;
  if (is_put_off) communicator->polls_left.fetch_sub(1, std::memory_order_relaxed);
  if (is_put_off || job == ncclInProgress) return ncclInProgress;
  if (job != ncclSuccess) return static_cast<ncclResult_t>(job);
  for (const Batch& batch : std::exchange(communicator->deferred, {})) {
    const ncclResult_t error = enqueue_batch(communicator, batch);
    if (error != ncclSuccess) return error;
  }
  return ncclSuccess;
}

}  // namespace

Communicator::~Communicator() {
  if (job.joinable()) job.join();
}

bool Communicator::has_neighbours() {
  const int mine = slot().process.load(std::memory_order_relaxed);
  for (int other = 0; other < num_ranks; ++other) {
    const int theirs = segment().ranks[other].process.load(std::memory_order_relaxed);
    if (other != rank && theirs == mine) return true;
  }
  return false;
}

std::string Communicator::text() {
  const std::lock_guard lock(text_mutex_);
  return text_;
}

void Communicator::set_text(const std::string& text) {
  const std::lock_guard lock(text_mutex_);
  text_ = text;
}

void Communicator::raise(ncclResult_t error, const std::string& text) {
  int none = ncclSuccess;
  const std::lock_guard lock(text_mutex_);
  if (async_error.compare_exchange_strong(none, error, std::memory_order_relaxed)) text_ = text;
}

std::string& last_text() {
  thread_local std::string text;
  return text;
}

const Fabric& fabric() { return the_fabric; }
void set_fabric(const Fabric& fabric) { the_fabric = fabric; }
void reset() { the_fabric = {}; }

void fail_after(const char* api, int n, ncclResult_t error, int device) {
  Api::named(api).fail_after(n, error, device);
}

void fail_async(ncclComm_t handle, ncclResult_t error, const char* text) {
  handle->communicator->raise(error, text);
  handle->communicator->segment().ring(handle->communicator->rank);
}

ncclResult_t find_alive(ncclComm_t handle, const char* api, CommunicatorRef* communicator) {
  if (handle == nullptr) return refuse(ncclInvalidArgument, api, ": no communicator");
  *communicator = handle->communicator;
  if (*communicator) return ncclSuccess;
  return refuse(ncclInvalidArgument, api, ": the communicator was aborted or destroyed");
}

ncclResult_t find_ready(ncclComm_t handle, const char* api, CommunicatorRef* communicator) {
  if (const ncclResult_t error = find_alive(handle, api, communicator); error != ncclSuccess) {
    return error;
  }
  Communicator& it = **communicator;
  if (it.job_result.load(std::memory_order_acquire) == ncclInProgress ||
      it.polls_left.load(std::memory_order_relaxed) > 0 || !it.deferred.empty()) {
    return refuse(ncclInvalidArgument, api, ": the communicator is in progress: poll it first");
  }
  const int async = it.async_error.load(std::memory_order_relaxed);
  if (async != ncclSuccess) return static_cast<ncclResult_t>(async);
  if (it.is_finalized.load(std::memory_order_relaxed)) {
    return refuse(ncclInvalidUsage, api, ": the communicator is finalized");
  }
  return static_cast<ncclResult_t>(it.job_result.load(std::memory_order_relaxed));
}

}  // namespace cpattn::fake_nccl

using namespace cpattn::fake_nccl;

ncclResult_t ncclGetVersion(int* version) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    *version = fabric().version;
    return ncclSuccess;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    *id = {};
    std::snprintf(id->internal, sizeof(id->internal), "%s", new_segment_name().c_str());
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* handle, int num_ranks, ncclUniqueId id, int rank) {
  static Api& api = Api::named(__func__);
  return call(api, [&] { return init(handle, num_ranks, id, rank, nullptr); });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int num_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  static Api& api = Api::named(__func__);
  return call(api, [&] { return init(handle, num_ranks, id, rank, config); });
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* child,
                           ncclConfig_t* config) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef parent;
    const ncclResult_t error = find_ready(handle, "ncclCommSplit", &parent);
    return error != ncclSuccess ? error : start_split(*parent, color, key, child, config);
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_alive(handle, "ncclCommGetAsyncError", &communicator);
    if (error == ncclSuccess) *state = poll(communicator);
    return error;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_ready(handle, "ncclCommFinalize", &communicator);
    if (error != ncclSuccess) return error;
    communicator->is_finalized.store(true, std::memory_order_relaxed);
    return start_job(*communicator, communicator->is_blocking,
                     [it = communicator.get()] { return drain(*it); });
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    if (handle == nullptr) return ncclSuccess;
    const ncclResult_t error = find_alive(handle, "ncclCommDestroy", &communicator);
    if (error != ncclSuccess) return error;
    drain(*communicator);
    communicator->is_destroyed.store(true, std::memory_order_relaxed);
    close(handle, Presence::left);
    wait_for_graphs(*communicator);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    if (handle == nullptr) return ncclSuccess;
    const ncclResult_t error = find_alive(handle, "ncclCommAbort", &communicator);
    if (error != ncclSuccess) return error;
    communicator->is_aborted.store(true, std::memory_order_relaxed);
    close(handle, Presence::aborted);
    wait_for_graphs(*communicator);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_ready(handle, "ncclCommCount", &communicator);
    if (error == ncclSuccess) *count = communicator->num_ranks;
    return error;
  });
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_ready(handle, "ncclCommUserRank", &communicator);
    if (error == ncclSuccess) *rank = communicator->rank;
    return error;
  });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_ready(handle, "ncclCommCuDevice", &communicator);
    if (error == ncclSuccess) *device = communicator->device;
    return error;
  });
}

const char* ncclGetLastError(ncclComm_t handle) {
  thread_local std::string text;
  text = last_text();
  if (handle != nullptr && handle->communicator && !handle->communicator->text().empty()) {
    text = handle->communicator->text();
  }
  return text.c_str();
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (static_cast<int>(result)) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}
