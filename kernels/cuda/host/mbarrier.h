// mbarrier on the host: a barrier of arrivals and bytes in eight bytes of shared memory.
//
// Phases alternate in parity, beginning with 0. A phase is complete when as many threads have
// arrived as init said and as many bytes have come as were expected.
#pragma once

#include "kernels/cuda/host/thread.h"

namespace cpattn::cuda_host {

void mbarrier_init(SharedAddress at, unsigned num_arrivals);
void mbarrier_arrive(SharedAddress at);
/// Adds to the bytes that the phase waits for, then arrives.
void mbarrier_arrive_expect_bytes(SharedAddress at, unsigned num_bytes);
/// Until the phase of this parity is complete. What came before the arrivals happens before what
/// follows.
void mbarrier_wait(SharedAddress at, unsigned parity);

/// For copies: `num_bytes` have come.
void mbarrier_complete_bytes(Block& block, SharedAddress at, unsigned num_bytes);
/// For copies, at their start: the phase under way will not be complete without what precedes.
void mbarrier_release(SharedAddress at);

}  // namespace cpattn::cuda_host
