// The double of the CUDA runtime, which host code is linked with instead of libcudart, seen by
// tests: what the machine is like, which call fails, what was left behind.
//
// A stream is a thread with a queue, a kernel is run by the host layer's Executor, device memory is
// heap memory filled with NaN, a graph is recorded work. Compiled against the runtime's own header,
// so a call that does not fit it does not compile. Stricter than a device wherever a device may go
// either way:
//
// - cudaFree frees at once, whatever is still running; ordering memory across streams takes events.
// - Streams know no order but what events, synchronisation and the queue give, also to the thread
//   sanitizer: cudaFree, cudaMalloc and polling an unfinished event order nothing.
// - The legacy default stream and the per-thread one are refused; or, if a test wants the former
//   (Machine::has_default_stream), it waits for no other and no other waits for it.
// - A copy whose direction contradicts its pointers, or which leaves their allocations, is refused.
// - An asynchronous copy of pageable memory blocks, as on a device, and is counted.
// - A launch needs the stream's device to be current.
// - Graphs hold no allocations (cudaMallocAsync is refused in a capture) and no other graphs.
//
// What it does not have: kernels of one stream that overlap, managed memory, textures, IPC, time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "kernels/cuda/host/executor.h"

namespace cpattn::fake_cuda {

inline constexpr int kMaxDevices = 16;

/// All devices are alike. The default is a Hopper with few multiprocessors.
struct Machine {
  int num_devices = 8;
  int compute_major = 9;
  int compute_minor = 0;
  int num_multiprocessors = 4;
  std::size_t shared_bytes_per_multiprocessor = 228 * 1024;
  std::size_t shared_bytes_per_block = 227 * 1024;  ///< opted in; sm_80 has 163, sm_120 99 KiB
  std::size_t memory_bytes = std::size_t{1} << 40;  ///< of each device
  int driver_version = CUDART_VERSION;              ///< 0: no driver
  int runtime_version = CUDART_VERSION;
  bool has_peer_access = true;
  bool has_memory_pools = true;
  /// Whether work may be given to the legacy default stream, which is then in order with no other.
  bool has_default_stream = false;
};

/// For all calls from now on. Not while other threads use the runtime.
void set_machine(const Machine& machine);
const Machine& machine();
/// How kernels that are launched or captured from now on are executed. Likewise.
void set_kernel_options(const cuda_host::Options& options);

/// The n-th call of `api` from now (1: the next) fails with `error`, once; n = 0 takes that back.
/// `device`: only calls while this one is current count. Names are those of the runtime's
/// functions; a launch is "cudaLaunchKernelEx". "kernel" is the execution of one, and what goes
/// wrong there is reported by later calls, all of them, as on a device.
void fail_after(const char* api, int n, cudaError_t error, int device = -1);
/// Calls of `api` since reset(), whatever their outcome.
std::uint64_t num_calls(const char* api);

/// Pauses of up to limit_us before each operation of a stream, drawn from the seed; 0: none. Shows
/// a missing wait by wrong results.
void set_delays(std::uint64_t seed, unsigned limit_us);

/// Sets a field of the machine by its name, in a program that has opened the doubles as a shared
/// object: tests of the C and Python faces. 0; 1 when there is no such field.
extern "C" int cpattn_fake_machine(const char* field, long value);
/// reset().
extern "C" void cpattn_fake_reset();

/// Work of a test's own in a stream, or in the graph that the stream is captured into.
cudaError_t run_in_stream(cudaStream_t stream, std::function<void()> work);

/// What has been made and not destroyed.
struct Live {
  std::int64_t device_allocations = 0;
  std::int64_t host_allocations = 0;  ///< pinned, and registered
  std::int64_t streams = 0;
  std::int64_t events = 0;
  std::int64_t graphs = 0;
  std::int64_t graph_execs = 0;
  std::int64_t pools = 0;
  std::int64_t communicators = 0;

  bool operator==(const Live&) const = default;
};
Live live();
/// Copies that were asked to be asynchronous and were not, since they touch pageable memory.
std::uint64_t num_pageable_copies();

/// Why the last call failed, or what a kernel did wrong: what a device would not have said. Also
/// part of cudaGetErrorString for that error.
std::string complaint();

/// Takes back failures, delays, kernel options, the machine, counts of calls, complaints and the
/// errors of devices. What is alive stays so. The calling thread's last error and device, too.
void reset();

}  // namespace cpattn::fake_cuda
