// The double of NCCL, which host code is linked with instead of libnccl, seen by tests: what goes
// wrong in it.
//
// Ranks are threads or processes; a communicator is a segment of shared memory with a queue for
// each ordered pair. A group makes all its sends and receives progress at once; the operations of
// a pair are matched in their order. Stricter than NCCL where NCCL may go either way:
//
// - A communicator with blocking = 0 is in progress until it has been asked twice; likewise after
//   every group, whose transfers come into their stream only then: NCCL puts them there by a thread
//   of its own. A group that meets a peer for the first time is refused under capture: warm up.
// - Buffers must be device memory (of the communicator's device) or pinned, large enough; between
//   ranks of one process not of a pool, since NCCL may let one device use another's memory, and
//   peer access does not open pools.
// - One communicator serves one stream at a time.
// - Sizes that differ between sender and receiver are an asynchronous error, not a hang.
// - After an asynchronous error, or where a peer does not come, the stream is busy until
//   ncclCommAbort. Any use of a communicator after abort or destroy is ncclInvalidArgument.
// - ncclCommDestroy and ncclCommAbort do not return before the last graph is gone that has recorded
//   a transfer of the communicator, as those of NCCL.
//
// What it does not have: reductions, initialisation inside a group, two streams in one group.
#pragma once

#include <nccl.h>

namespace cpattn::fake_nccl {

inline constexpr int kMaxRanks = 16;

struct Fabric {
  /// NCCL refuses two ranks on one device.
  bool allows_duplicate_devices = false;
  /// A peer that has left, aborted or died is an asynchronous ncclRemoteError for who waits for
  /// it, as over a network; otherwise nobody is told, as between devices of one machine.
  bool notices_lost_peers = false;
  int version = NCCL_VERSION_CODE;
};

/// For all calls from now on. Not while other threads use the library.
void set_fabric(const Fabric& fabric);
const Fabric& fabric();

/// The n-th call of `api` from now (1: the next) fails with `error`, once. `device`: only calls
/// while this one is current count. Counts of calls are fake_cuda::num_calls's.
void fail_after(const char* api, int n, ncclResult_t error, int device = -1);
/// An asynchronous error of this rank, as if the network had broken.
void fail_async(ncclComm_t communicator, ncclResult_t error, const char* text);

/// Takes back the fabric; fake_cuda::reset takes back failures of calls.
void reset();

}  // namespace cpattn::fake_nccl
