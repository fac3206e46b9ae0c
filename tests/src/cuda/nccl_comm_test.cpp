#include "src/comm/nccl_comm.h"

#include <string>
#include <vector>

#include "tests/src/cuda/ring_of_bytes.h"
#include "tests/support/cuda/fake_nccl.h"

namespace cpattn {
namespace {

class NcclCommunicators : public fake_cuda::DoubleTest {
 protected:
  ~NcclCommunicators() override { fake_nccl::reset(); }

  /// What each rank's body throws, "" for nothing.
  template <class Exception, class Body>
  std::vector<std::string> texts(int size, const Body& body) {
    std::vector<std::string> all(static_cast<std::size_t>(size));
    LoopbackWorld world(size, {.must_receive_all = false});
    world.run([&](Communicator& comm) {
      try {
        body(comm);
      } catch (const Exception& error) {
        all[static_cast<std::size_t>(comm.rank())] = error.what();
      }
      comm.barrier(soon(), "all have tried");
    });
    return all;
  }
};

TEST_F(NcclCommunicators, AreMadeOverAControlPlane) {
  LoopbackWorld world(3);
  world.run([](Communicator& comm) {
    const CudaDevice device(comm.rank());
    NcclCommunicator made = NcclCommunicator::make(comm, device, Seconds(60));
    int size = 0, rank = -1;
    EXPECT_EQ(ncclCommCount(made.handle(), &size), ncclSuccess);
    EXPECT_EQ(ncclCommUserRank(made.handle(), &rank), ncclSuccess);
    EXPECT_EQ(size, 3);
    EXPECT_EQ(rank, comm.rank());
    made.check();
    made.abort();
    EXPECT_TRUE(made.is_aborted());
    EXPECT_EQ(text_thrown_by<CommError>([&] { made.handle(); }),
              "rank " + std::to_string(rank) + ": the NCCL communicator was aborted");
  });
}

TEST_F(NcclCommunicators, TwoRanksOnOneGpuAreRefusedBeforeNcclIsAsked) {
  const auto all = texts<InvalidArgument>(4, [](Communicator& comm) {
    const CudaDevice device(comm.rank() == 3 ? 1 : comm.rank());
    (void)NcclCommunicator::make(comm, device, Seconds(60));
  });
  for (const std::string& text : all) {
    EXPECT_EQ(
        text,
        "ranks 1 and 3 have the same GPU, cuda:1 double of a device (sm_90), sm_90, 4 "
        "multiprocessors; NCCL expects one for each rank (exchange host lets ranks share one)");
  }
  EXPECT_EQ(fake_cuda::num_calls("ncclCommInitRankConfig"), 0u);
}

TEST_F(NcclCommunicators, ALateRankIsNamed) {
  std::string text;
  LoopbackWorld world(2, {.must_receive_all = false});
  world.run([&](Communicator& comm) {
    if (comm.rank() == 1) return;
    const CudaDevice device(0);
    text = text_thrown_by<CommError>(
        [&] { (void)NcclCommunicator::make(comm, device, Seconds(0.2)); });
  });
  EXPECT_EQ(text.find("rank 0: NCCL initialisation: nothing from rank 1 within 0.2 s"), 0u) << text;
}

TEST_F(NcclCommunicators, AFailureOfOneIsToldToAll) {
  fake_nccl::fail_after("ncclCommInitRankConfig", 1, ncclSystemError, 1);
  const Clock::time_point begin = Clock::now();
  auto all = texts<CommError>(3, [](Communicator& comm) {
    const CudaDevice device(comm.rank());
    (void)NcclCommunicator::make(comm, device, Seconds(0.3));
  });
  EXPECT_LT(Seconds(Clock::now() - begin), Seconds(3)) << "nobody waits for a verdict in vain";
  for (const std::string& text : all) {
    EXPECT_EQ(text,
              "NCCL initialisation: ranks 0, 2: still in progress at the deadline; rank 1: NCCL: "
              "unhandled system error (a failure that a test asked for)");
  }

  fake_nccl::fail_after("ncclGetUniqueId", 1, ncclInternalError);
  all = texts<InvalidArgument>(2, [](Communicator& comm) {
    const CudaDevice device(comm.rank());
    (void)NcclCommunicator::make(comm, device, Seconds(60));
  });
  EXPECT_EQ(all[0].find("rank 0: NCCL: internal error"), 0u) << all[0];
  EXPECT_EQ(all[0], all[1]);
}

/// A caller's communicator, blocking or not.
ncclComm_t callers_comm(const ncclUniqueId& id, int size, int rank) {
  EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, size, id, rank), ncclSuccess);
  return comm;
}

TEST_F(NcclCommunicators, BorrowedOnesStayTheCallers) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  LoopbackWorld world(2);
  world.run([&](Communicator& comm) {
    ncclComm_t callers = callers_comm(id, 2, comm.rank());
    {
      const auto device = std::make_shared<CudaDevice>(comm.rank());
      const CudaStream compute = make_compute_stream(comm.rank());
      NcclTransport transport(not_owned(comm), device,
                              NcclCommunicator::borrow(comm, *device, callers, Seconds(60)));
      expect_passes_deliver(transport, {compute.get()}, {}, 1);
    }
    EXPECT_EQ(ncclCommDestroy(callers), ncclSuccess);
  });
}

TEST_F(NcclCommunicators, BorrowedOnesThatDoNotFitAreRefusedTogether) {
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  struct Case {
    const char* text;
    std::function<ncclComm_t(Communicator&, ncclComm_t)> choose;
    int device_of_rank_1;
  };
  ncclComm_t of_rank_0 = nullptr;
  const Case kCases[] = {
      {"rank 1: no NCCL communicator was given",
       [](Communicator& comm, ncclComm_t mine) { return comm.rank() == 1 ? nullptr : mine; }, 1},
      {"rank 1: the NCCL communicator that was given is of rank 0 of 2, expected rank 1 of 2",
       [&](Communicator&, ncclComm_t) { return of_rank_0; }, 1},
      {"rank 1: the NCCL communicator that was given is of cuda:1, expected cuda:2",
       [](Communicator&, ncclComm_t mine) { return mine; }, 2},
  };
  const auto texts_of = [&](const Case& at, bool is_destroyed) {
    return texts<InvalidArgument>(2, [&](Communicator& comm) {
      ncclComm_t mine = callers_comm(id, 2, comm.rank());
      if (comm.rank() == 0) of_rank_0 = mine;
      comm.barrier(soon(), "made");
      if (is_destroyed) {
        EXPECT_EQ(ncclCommDestroy(mine), ncclSuccess);
      }
      const CudaDevice device(comm.rank() == 1 ? at.device_of_rank_1 : 0);
      try {
        (void)NcclCommunicator::borrow(comm, device, at.choose(comm, mine), Seconds(60));
      } catch (...) {
        comm.barrier(soon(), "refused");
        if (!is_destroyed) {
          EXPECT_EQ(ncclCommDestroy(mine), ncclSuccess);
        }
        throw;
      }
    });
  };
  for (const Case& at : kCases) {
    for (const std::string& text : texts_of(at, false)) EXPECT_EQ(text, at.text);
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  for (const std::string& text : texts_of(kCases[2], true)) {
    EXPECT_NE(text.find("the NCCL communicator that was given cannot be used: NCCL: invalid "
                        "argument"),
              std::string::npos)
        << text;
  }
}

/// Ranks of one parity.
class HalfComm : public Communicator {
 public:
  explicit HalfComm(Communicator& whole) : whole_(whole) {}
  int rank() const override { return whole_.rank() / 2; }
  int size() const override { return whole_.size() / 2; }
  std::string_view transport() const override { return "half"; }
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    return whole_.isend(bytes, 2 * peer + whole_.rank() % 2, tag);
  }
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    return whole_.irecv(bytes, 2 * peer + whole_.rank() % 2, tag);
  }
  bool test(Pending& pending) override { return whole_.test(pending); }
  void abort(int exit_code, std::string_view reason) noexcept override {
    whole_.abort(exit_code, reason);
  }

 private:
  Communicator& whole_;
};

TEST_F(NcclCommunicators, SubGroupsHaveTheirOwn) {
  fake_cuda::set_delays(2, 200);
  LoopbackWorld world(4);
  world.run([](Communicator& comm) {
    HalfComm half(comm);
    const auto device = std::make_shared<CudaDevice>(comm.rank());
    const CudaStream compute = make_compute_stream(comm.rank());
    NcclTransport whole(not_owned(comm), device,
                        NcclCommunicator::make(comm, *device, Seconds(60)));
    NcclTransport part(not_owned(half), device, NcclCommunicator::make(half, *device, Seconds(60)));
    expect_passes_deliver(part, {compute.get()}, {}, 2);
    expect_passes_deliver(whole, {compute.get()}, {}, 1);
    expect_passes_deliver(part, {compute.get()}, {}, 1);
  });
}

}  // namespace
}  // namespace cpattn
