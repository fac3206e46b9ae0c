#include "src/comm/nccl_comm.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "src/device/cuda_handles.h"

namespace cpattn {
namespace {

/// Between two questions whether a call is over: every group of transfers asks, so soon at first.
constexpr std::chrono::microseconds kFirstGlance{5}, kLongestGlance{200};
/// For graphs that are gone to be seen to be gone.
constexpr Seconds kEndTime{1.0};
/// For the ranks to tell one another how the initialisation ended, which they learn at about the
/// same time.
constexpr Seconds kVerdictTime{5.0};
constexpr std::string_view kInit = "NCCL initialisation";

std::string describe(ncclResult_t result, ncclComm_t comm) {
  const std::string last = ncclGetLastError(comm);
  return detail::concat("NCCL: ", ncclGetErrorString(result), last.empty() ? "" : " (", last,
                        last.empty() ? "" : ")");
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// "ranks 0 and 2 are both on cuda:1 NVIDIA H200, ...": the first two that are; "" when none are.
std::string find_duplicate(const std::vector<std::vector<std::byte>>& uuids,
                           const std::vector<std::vector<std::byte>>& names) {
  for (std::size_t rank = 0; rank < uuids.size(); ++rank) {
    const auto first = std::find(uuids.begin(), uuids.end(), uuids[rank]);
    const auto other = static_cast<std::size_t>(first - uuids.begin());
    if (other == rank) continue;
    return detail::concat("ranks ", other, " and ", rank, " have the same GPU, ",
                          text_of(names[other]),
                          "; NCCL expects one for each rank (exchange "
                          "host lets ranks share one)");
  }
  return "";
}

void refuse_duplicates(Communicator& control, const CudaDevice& device,
                       Clock::time_point deadline) {
  const std::string name = device.description();
  const auto uuids = control.all_gather(std::as_bytes(std::span(device.uuid())), deadline, kInit);
  const auto names = control.all_gather(std::as_bytes(std::span(name)), deadline, kInit);
  const std::string problem = find_duplicate(uuids, names);
  require(problem.empty(), problem);
}

/// Rank 0's, on every rank.
ncclUniqueId agree_on_id(Communicator& control, Clock::time_point deadline) {
  ncclUniqueId id{};
  std::string problem;
  if (control.rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) problem = describe(result, nullptr);
  }
  refuse_together(control, problem, deadline, kInit);
  const auto ids = control.all_gather(
      control.rank() == 0 ? std::as_bytes(std::span(&id, 1)) : std::span<const std::byte>{},
      deadline, kInit);
  std::memcpy(&id, ids[0].data(), sizeof id);
  return id;
}

/// How a call that does not block ended, "" when well.
std::string await(ncclComm_t comm, ncclResult_t result, Clock::time_point deadline) {
  for (auto glance = kFirstGlance; result == ncclInProgress;
       glance = std::min(2 * glance, kLongestGlance)) {
    const ncclResult_t answer = ncclCommGetAsyncError(comm, &result);
    if (answer != ncclSuccess) result = answer;
    if (result != ncclInProgress) break;
    if (Clock::now() >= deadline) return "still in progress at the deadline";
    std::this_thread::sleep_for(glance);
  }
  return result == ncclSuccess ? "" : describe(result, comm);
}

std::string problem_with_borrowed(ncclComm_t comm, const Communicator& control, int device) {
  int rank = -1, size = -1, ordinal = -1;
  if (comm == nullptr) return "no NCCL communicator was given";
  ncclResult_t result = ncclCommUserRank(comm, &rank);
  if (result == ncclSuccess) result = ncclCommCount(comm, &size);
  if (result == ncclSuccess) result = ncclCommCuDevice(comm, &ordinal);
  if (result != ncclSuccess) {
    return detail::concat("the NCCL communicator that was given cannot be used: ",
                          describe(result, nullptr));
  }
  if (rank != control.rank() || size != control.size()) {
    return detail::concat("the NCCL communicator that was given is of rank ", rank, " of ", size,
                          ", expected rank ", control.rank(), " of ", control.size());
  }
  if (ordinal != device) {
    return detail::concat("the NCCL communicator that was given is of cuda:", ordinal,
                          ", expected cuda:", device);
  }
  return "";
}

}  // namespace

void nccl_check(ncclResult_t result, int rank, std::string_view what, ncclComm_t comm) {
  if (result != ncclSuccess) [[unlikely]]
    throw CommError(detail::concat("rank ", rank, ": ", what, ": ", describe(result, comm)));
}

NcclCommunicator NcclCommunicator::make(Communicator& control, const CudaDevice& device,
                                        Seconds timeout) {
  const Clock::time_point deadline = deadline_after(timeout);
  refuse_duplicates(control, device, deadline);
  const ncclUniqueId id = agree_on_id(control, deadline);

  const DeviceGuard guard(device.ordinal());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t begun =
      ncclCommInitRankConfig(&comm, control.size(), id, control.rank(), &config);
  const std::string mine = await(comm, begun, deadline);
  NcclCommunicator made(control.rank(), comm, true);

  // A rank on which it failed would be a silence to the others.
  try {
    const Seconds left = std::max(Seconds(0), Seconds(deadline - Clock::now()));
    refuse_together(control, mine, deadline_after(left + kVerdictTime), kInit);
  } catch (const InvalidArgument& refusal) {
    made.abort();
    throw CommError(detail::concat(kInit, ": ", refusal.what()));
  } catch (...) {
    made.abort();
    throw;
  }
  return made;
}

NcclCommunicator NcclCommunicator::borrow(Communicator& control, const CudaDevice& device,
                                          ncclComm_t comm, Seconds timeout) {
  refuse_together(control, problem_with_borrowed(comm, control, device.ordinal()),
                  deadline_after(timeout), "borrowed NCCL communicator");
  return NcclCommunicator(control.rank(), comm, false);
}

NcclCommunicator::NcclCommunicator(NcclCommunicator&& other) noexcept
    : rank_(other.rank_),
      handle_(std::exchange(other.handle_, nullptr)),
      is_owned_(other.is_owned_),
      is_in_graphs_(other.is_in_graphs_) {}

NcclCommunicator::~NcclCommunicator() {
  if (is_owned_) end(ncclCommDestroy, kEndTime);
}

ncclComm_t NcclCommunicator::handle() const {
  require<CommError>(handle_ != nullptr, "rank ", rank_, ": the NCCL communicator was aborted");
  return handle_;
}

void NcclCommunicator::settle(Clock::time_point deadline, std::string_view what) const {
  const std::string problem = await(handle(), ncclInProgress, deadline);
  require<CommError>(problem.empty(), "rank ", rank_, ": ", what, ": ", problem);
}

void NcclCommunicator::check() const {
  ncclResult_t state = ncclSuccess;
  nccl_check(ncclCommGetAsyncError(handle(), &state), rank_, "NCCL communicator", nullptr);
  if (state != ncclInProgress) nccl_check(state, rank_, "NCCL communicator", handle_);
}

// Streams leave its transfers at once, whenever the call returns.
void NcclCommunicator::abort() noexcept { end(ncclCommAbort, Seconds(0)); }

void NcclCommunicator::end(ncclResult_t (*call)(ncclComm_t), Seconds patience) noexcept {
  ncclComm_t comm = std::exchange(handle_, nullptr);
  if (comm == nullptr) return;
  if (!is_in_graphs_) {
    call(comm);
    return;
  }
  // The graphs are the caller's, who may destroy them only after this.
  std::promise<void> over;
  const std::future<void> is_over = over.get_future();
  std::thread([call, comm, over = std::move(over)]() mutable {
    call(comm);
    over.set_value();
  }).detach();
  is_over.wait_for(patience);
}

}  // namespace cpattn
