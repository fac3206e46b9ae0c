// NcclCommunicator: an NCCL communicator of the ranks of a control plane, made or borrowed.
//
// Sub-groups: split the control plane (MpiCommunicator::split) and make one over the part. That is
// a communicator of its own, with its own stream and its own failures; ncclCommSplit would save a
// little of NCCL's memory and tie the parts' lives together.
#pragma once

#include <nccl.h>

#include <string>
#include <string_view>

#include "src/base/error.h"
#include "src/comm/communicator.h"
#include "src/device/cuda_device.h"

namespace cpattn {

/// CommError unless `result` is success: "rank 1: WHAT: NCCL: unhandled cuda error (...)".
void nccl_check(ncclResult_t result, int rank, std::string_view what, ncclComm_t comm);

/// Move-only. Used by one thread at a time; abort() belongs to the same rule.
///
/// Graphs  NCCL gives a communicator up only when no graph is left that has recorded a transfer of
///         it; its calls wait for that. So the end of one that was recorded is waited for by a
///         thread of its own, and graphs may outlive it, if they are launched no more.
class NcclCommunicator {
 public:
  /// Collective over `control`: rank 0 makes the id, which travels over the control plane; the
  /// initialisation does not block and is polled.
  /// Errors  CommError at the deadline, naming a rank that did not come; CommError on every rank,
  ///         with one text, when NCCL fails on any; InvalidArgument on every rank, with one text
  ///         and before NCCL is asked, when two ranks have the same GPU.
  [[nodiscard]] static NcclCommunicator make(Communicator& control, const CudaDevice& device,
                                             Seconds timeout);

  /// Collective. The caller's communicator, which must outlive this and must be used by nobody else
  /// meanwhile. Not destroyed by us; but aborted when a transfer fails, and then the caller must
  /// not destroy it either (is_aborted()). Graphs that recorded it end before the caller destroys
  /// it, or that waits for ever. It should have been made with blocking = 0: a call that
  /// blocks for a peer's sake cannot be given up.
  /// Errors  InvalidArgument on every rank when, on any, rank or size differ from the control
  ///         plane's, it is of another device, or it was destroyed or aborted.
  [[nodiscard]] static NcclCommunicator borrow(Communicator& control, const CudaDevice& device,
                                               ncclComm_t comm, Seconds timeout);

  NcclCommunicator(NcclCommunicator&& other) noexcept;
  NcclCommunicator& operator=(NcclCommunicator&&) = delete;
  ~NcclCommunicator();

  int rank() const { return rank_; }
  /// CommError after abort().
  ncclComm_t handle() const;
  bool is_aborted() const { return handle_ == nullptr; }

  /// Waits until the last call is no longer in progress. CommError at the deadline, and for what
  /// NCCL reports, also of earlier transfers.
  void settle(Clock::time_point deadline, std::string_view what) const;
  /// Throws what NCCL reports; does not wait.
  void check() const;

  /// A transfer is about to be recorded in a graph.
  void note_capture() { is_in_graphs_ = true; }

  /// Makes streams leave its transfers, wherever the peers are. The end of it on this rank.
  void abort() noexcept;

 private:
  /// ncclCommDestroy or ncclCommAbort; waits at most `patience` for graphs.
  void end(ncclResult_t (*call)(ncclComm_t), Seconds patience) noexcept;

  NcclCommunicator(int rank, ncclComm_t handle, bool is_owned)
      : rank_(rank), handle_(handle), is_owned_(is_owned) {}

  int rank_;
  ncclComm_t handle_;  // null once aborted or moved from
  bool is_owned_;
  bool is_in_graphs_ = false;
};

}  // namespace cpattn
