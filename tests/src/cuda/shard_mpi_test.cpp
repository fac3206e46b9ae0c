// Transports of shards with ranks as processes: control plane and messages by MPI, streams and NCCL
// by their doubles.
#include "src/comm/mpi_comm.h"
#include "tests/src/cuda/ring_of_bytes.h"

namespace cpattn {
namespace {

class ShardProcesses : public fake_cuda::DoubleTest,
                       public testing::WithParamInterface<ShardCase> {};

TEST_P(ShardProcesses, EverySpanArrives) {
  fake_cuda::set_delays(5, 100);
  MpiCommunicator comm;
  run_shards(GetParam().mover, comm, [](ShardTransport& transport, Stream stream) {
    for (const int direction : {1, -1}) {
      expect_passes_deliver(transport, stream, {.direction = direction, .delay_seed = 3}, 2);
    }
  });
}

TEST_P(ShardProcesses, SubGroupsOfASplitControlPlane) {
  MpiCommunicator whole;
  const auto part = whole.split(whole.rank() % 2, -whole.rank());
  const auto device = std::make_shared<CudaDevice>(whole.rank());
  const CudaStream compute = make_compute_stream(whole.rank());
  std::shared_ptr<ShardTransport> transport;
  if (GetParam().mover == Mover::nccl) {
    transport = std::make_shared<NcclTransport>(
        not_owned(*part), device, NcclCommunicator::make(*part, *device, Seconds(60)));
  } else {
    transport =
        std::make_shared<StagedTransport>(not_owned(*part), device, MessageMemory::pinned_host);
  }
  expect_passes_deliver(*transport, {compute.get()}, {}, 2);
}

TEST(MpiCommunicatorOfDevices, SaysWhetherItTakesDeviceMemory) {
  MpiCommunicator comm;
  const auto device = std::make_shared<CudaDevice>(comm.rank());
  if (comm.takes_device_memory()) return;  // then the passes above would be of the same kind
  EXPECT_EQ(text_thrown_by<Unsupported>(
                [&] { StagedTransport transport(not_owned(comm), device, MessageMemory::device); }),
            "transport mpi does not take device memory: stage it");
}

INSTANTIATE_TEST_SUITE_P(Over, ShardProcesses,
                         testing::Values(ShardCase{Mover::nccl, "nccl", 0},
                                         ShardCase{Mover::staged, "staged", 0}),
                         case_name);

}  // namespace
}  // namespace cpattn
