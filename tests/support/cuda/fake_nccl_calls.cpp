// NCCL's functions of transfers, groups and memory.
#include <set>
#include <utility>
#include <vector>

#include "tests/support/cuda/fake_memory.h"
#include "tests/support/cuda/fake_nccl_comm.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_nccl;
using cpattn::fake_cuda::Api;
using cpattn::fake_cuda::Stream;

namespace {

/// What the calling thread has put into the group that it has open.
struct Group {
  struct Member {
    CommunicatorRef communicator;
    Batch batch;
  };
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Member> members;  ///< one for each communicator, in the order of their first call
};
thread_local Group group;

std::size_t bytes_of(ncclDataType_t type) {
  switch (static_cast<int>(type)) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

ncclResult_t check_buffer(Communicator& communicator, const char* api, const void* buffer,
                          std::size_t bytes) {
  if (bytes == 0) return ncclSuccess;
  const auto allocation = cpattn::fake_cuda::find_allocation(buffer);
  if (!allocation) return refuse(ncclInvalidArgument, api, ": not device memory, nor pinned");
  const bool is_device = allocation->kind == cpattn::fake_cuda::MemoryKind::device;
  if (is_device && allocation->device != communicator.device) {
    return refuse(ncclInvalidArgument, api, ": memory of device ", allocation->device,
                  " with a communicator of device ", communicator.device);
  }
  if (allocation->is_of_pool && communicator.has_neighbours()) {
    return refuse(ncclInvalidArgument, api, ": memory of a pool (cudaMallocAsync), which the ",
                  "devices of other ranks in this process do not see");
  }
  const auto before = static_cast<const std::byte*>(buffer) - allocation->begin;
  if (static_cast<std::size_t>(before) + bytes <= allocation->bytes) return ncclSuccess;
  return refuse(ncclInvalidArgument, api, ": ", bytes, " bytes from byte ", before,
                " of an allocation of ", allocation->bytes);
}

/// Adds transfers to the open group.
ncclResult_t append(ncclComm_t handle, const char* api, cudaStream_t stream_handle,
                    const std::vector<Transfer>& transfers) {
  CommunicatorRef communicator;
  ncclResult_t error = find_ready(handle, api, &communicator);
  if (error != ncclSuccess) return error;
  cudaError_t cuda_error = cudaSuccess;
  Stream* stream = cpattn::fake_cuda::stream_of(stream_handle, api, &cuda_error);
  if (stream == nullptr) return refuse(ncclUnhandledCudaError, cudaGetErrorString(cuda_error));
  if (stream->device != communicator->device) {
    return refuse(ncclInvalidUsage, api, ": a stream of device ", stream->device,
                  " with a communicator of device ", communicator->device);
  }
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0 || transfer.peer >= communicator->num_ranks) {
      return refuse(ncclInvalidArgument, api, ": peer ", transfer.peer, " of ",
                    communicator->num_ranks);
    }
    error = check_buffer(*communicator, api, transfer.data, transfer.bytes);
    if (error != ncclSuccess) return error;
  }
  Group::Member* member = nullptr;
  for (Group::Member& it : group.members) {
    if (it.communicator.get() == communicator.get()) member = &it;
  }
  if (member == nullptr) member = &group.members.emplace_back(communicator, Batch{stream, {}});
  if (member->batch.stream != stream) {
    return refuse(ncclInvalidUsage, api, ": one communicator in two streams of one group");
  }
  auto& all = member->batch.transfers;
  all.insert(all.end(), transfers.begin(), transfers.end());
  return ncclSuccess;
}

/// A batch of a communicator that does not block is put off until a poll.
ncclResult_t issue(const Group::Member& member) {
  const CommunicatorRef& communicator = member.communicator;
  std::set<int> peers = communicator->connected;
  for (const Transfer& transfer : member.batch.transfers) peers.insert(transfer.peer);
  const bool is_new = peers.size() > communicator->connected.size();
  if (communicator->is_blocking) {
    communicator->connected = peers;
    return enqueue_batch(communicator, member.batch);
  }
  if (is_new && member.batch.stream->is_capturing()) {
    return refuse(ncclInvalidUsage,
                  "a communicator that does not block meets a peer for the "
                  "first time in a capture: warm up first");
  }
  communicator->connected = peers;
  communicator->deferred.push_back(member.batch);
  communicator->polls_left.store(1, std::memory_order_relaxed);
  return ncclInProgress;
}

ncclResult_t end_group() {
  const Group ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) return ended.error;
  ncclResult_t result = ncclSuccess;
  for (const Group::Member& member : ended.members) {
    const ncclResult_t one = issue(member);
    if (one != ncclSuccess && one != ncclInProgress) return one;
    if (one == ncclInProgress) result = one;
  }
  return result;
}

/// A call within the open group, or a group of its own.
ncclResult_t add_to_group(ncclComm_t handle, const char* api, cudaStream_t stream,
                          const std::vector<Transfer>& transfers) {
  const bool is_alone = group.depth == 0;
  const ncclResult_t error = append(handle, api, stream, transfers);
  if (!is_alone || error != ncclSuccess) return error;
  return end_group();
}

/// What fails in a group fails the whole group.
template <class Function>
ncclResult_t call_in_group(Api& api, Function function) {
  const ncclResult_t error = call(api, function);
  if (error == ncclSuccess || error == ncclInProgress) return error;
  if (group.depth == 0) group = {};
  if (group.depth > 0 && group.error == ncclSuccess) group.error = error;
  return error;
}

}  // namespace

ncclResult_t ncclGroupStart() {
  static Api& api = Api::named(__func__);
  return call(api, [] {
    ++group.depth;
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  static Api& api = Api::named(__func__);
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: no group is open");
  // A call that fails ends the group, too.
  if (const int injected = api.enter(); injected != 0) {
    group.error = refuse(static_cast<ncclResult_t>(injected), "a failure that a test asked for");
  }
  return --group.depth > 0 ? ncclSuccess : end_group();
}

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t handle, cudaStream_t stream) {
  static Api& api = Api::named(__func__);
  return call_in_group(api, [&] {
    auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
    return add_to_group(handle, "ncclSend", stream, {{true, peer, bytes, count * bytes_of(type)}});
  });
}

ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t handle, cudaStream_t stream) {
  static Api& api = Api::named(__func__);
  return call_in_group(api, [&] {
    auto* bytes = static_cast<std::byte*>(data);
    return add_to_group(handle, "ncclRecv", stream, {{false, peer, bytes, count * bytes_of(type)}});
  });
}

ncclResult_t ncclAllGather(const void* mine, void* all, std::size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
  static Api& api = Api::named(__func__);
  return call_in_group(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_ready(handle, "ncclAllGather", &communicator);
    if (error != ncclSuccess) return error;
    const std::size_t bytes = count * bytes_of(type);
    std::vector<Transfer> transfers;
    for (int rank = 0; rank < communicator->num_ranks; ++rank) {
      auto* from = static_cast<std::byte*>(const_cast<void*>(mine));
      auto* to = static_cast<std::byte*>(all) + static_cast<std::size_t>(rank) * bytes;
      transfers.push_back({true, rank, from, bytes});
      transfers.push_back({false, rank, to, bytes});
    }
    return add_to_group(handle, "ncclAllGather", stream, transfers);
  });
}

ncclResult_t ncclMemAlloc(void** memory, std::size_t bytes) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    const cudaError_t error = cudaMalloc(memory, bytes);
    return error == cudaSuccess ? ncclSuccess
                                : refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
  });
}

ncclResult_t ncclMemFree(void* memory) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    const cudaError_t error = cudaFree(memory);
    return error == cudaSuccess ? ncclSuccess
                                : refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
  });
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* data, std::size_t bytes,
                              void** registration) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    ncclResult_t error = find_ready(handle, "ncclCommRegister", &communicator);
    if (error == ncclSuccess) error = check_buffer(*communicator, "ncclCommRegister", data, bytes);
    if (error != ncclSuccess) return error;
    *registration = data;
    communicator->registrations.insert(data);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registration) {
  static Api& api = Api::named(__func__);
  return call(api, [&] {
    CommunicatorRef communicator;
    const ncclResult_t error = find_alive(handle, "ncclCommDeregister", &communicator);
    if (error != ncclSuccess) return error;
    if (communicator->registrations.erase(registration) > 0) return ncclSuccess;
    return refuse(ncclInvalidArgument, "ncclCommDeregister: not registered");
  });
}
