// Groups whose shards lie anywhere, as test parameters: the same bodies run on host memory and on
// the doubles of CUDA and NCCL.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/forwarding_comm.h"
#include "src/comm/loopback_comm.h"
#include "src/comm/nccl_transport.h"
#include "src/comm/staged_transport.h"
#include "tests/src/comm_world.h"
#include "tests/src/cuda/double_test.h"

namespace cpattn {

enum class Mover { host, nccl, staged, cuda_aware };

inline constexpr std::pair<Mover, const char*> kMovers[] = {{Mover::host, "host"},
                                                            {Mover::nccl, "nccl"},
                                                            {Mover::staged, "staged"},
                                                            {Mover::cuda_aware, "cuda_aware"}};

/// Device memory of the double is host memory, so any communicator takes it.
class TakingDeviceMemory : public ForwardingComm {
 public:
  using ForwardingComm::ForwardingComm;
  bool takes_device_memory() const override { return true; }
};

inline std::shared_ptr<Communicator> not_owned(Communicator& comm) {
  return {&comm, [](Communicator*) {}};
}

inline std::shared_ptr<ShardTransport> make_transport(Mover mover, Communicator& comm) {
  if (mover == Mover::host) return not_owned(comm);
  const auto device = std::make_shared<CudaDevice>(comm.rank());
  switch (mover) {
    case Mover::nccl:
      return std::make_shared<NcclTransport>(not_owned(comm), device,
                                             NcclCommunicator::make(comm, *device, Seconds(60)));
    case Mover::staged:
      return std::make_shared<StagedTransport>(not_owned(comm), device, MessageMemory::pinned_host);
    case Mover::cuda_aware:
      return std::make_shared<StagedTransport>(std::make_shared<TakingDeviceMemory>(comm), device,
                                               MessageMemory::device);
    case Mover::host:
      break;
  }
  return nullptr;
}

/// A compute stream of the rank's device, which becomes the thread's current one.
inline CudaStream make_compute_stream(int ordinal) {
  cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
  return make_cuda_stream();
}

using ShardBody = std::function<void(ShardTransport&, Stream)>;

/// Waits for the stream after the body.
inline void run_shards(Mover mover, Communicator& comm, const ShardBody& body) {
  const auto transport = make_transport(mover, comm);
  const CudaStream compute = mover == Mover::host ? CudaStream() : make_compute_stream(comm.rank());
  body(*transport, {compute.get()});
  transport->synchronize({compute.get()}, soon());
}

/// Ranks as threads.
inline void run_shards(Mover mover, int size, const ShardBody& body) {
  LoopbackWorld world(size);
  world.run([&](Communicator& comm) { run_shards(mover, comm, body); });
}

/// What a kernel would do: at once on the CPU, else when the stream gets to it.
inline void do_in(Stream stream, std::function<void()> work) {
  if (stream.handle == nullptr) return work();
  ASSERT_EQ(fake_cuda::run_in_stream(static_cast<cudaStream_t>(stream.handle), std::move(work)),
            cudaSuccess)
      << fake_cuda::complaint();
}

struct ShardCase {
  Mover mover;
  std::string name;
  int size;
};

inline void PrintTo(const ShardCase& at, std::ostream* out) { *out << at.name; }

inline std::vector<ShardCase> shard_cases(const std::vector<int>& sizes) {
  std::vector<ShardCase> cases;
  for (const auto& [mover, name] : kMovers) {
    for (const int size : sizes) cases.push_back({mover, name + std::to_string(size), size});
  }
  return cases;
}

inline std::string case_name(const testing::TestParamInfo<ShardCase>& info) {
  return info.param.name;
}

}  // namespace cpattn
