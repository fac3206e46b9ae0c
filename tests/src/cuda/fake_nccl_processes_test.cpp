// The double of NCCL among processes: the same code as among threads, and what only processes do.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "src/base/error.h"
#include "tests/src/cuda/nccl_ranks.h"

namespace cpattn::fake_nccl {
namespace {

constexpr int kStride = 1'000'000;
constexpr std::size_t kLong = 100'003;

/// How a process ends in which all went well; a sanitizer that gives up may end one with 0.
constexpr int kAllWell = 7, kNotWell = 8;

/// Segments with a name in the system.
int num_names() {
  int count = 0;
  const std::string own = detail::concat("cpattn-fake-nccl-", getpid(), "-");
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += entry.path().filename().string().rfind(own, 0) == 0 ? 1 : 0;
  }
  return count;
}

class NcclProcesses : public NcclTest {
 protected:
  /// Runs body(number) in a process of its own, which ends with what it returns.
  pid_t start(int number, const std::function<int(int)>& body) {
    fake_cuda::wait_for_workers();  // a fork takes no threads along
    const pid_t child = fork();
    EXPECT_GE(child, 0);
    if (child != 0) return child;
    const int result = body(number);
    _exit(::testing::Test::HasFailure() ? kNotWell : result);
  }
  static int status_of(pid_t child) {
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }
};

int pass_around(int number, int num_ranks, const ncclUniqueId& id) {
  Rank rank(number, num_ranks);
  if (rank.init(id) != ncclSuccess) return kNotWell;
  int* slots[2] = {rank.memory(kLong), rank.memory(kLong)};
  rank.count_from(kStride * number, slots[0], kLong);
  for (int step = 0; step < num_ranks - 1; ++step) {
    if (rank.pass_on(slots[step % 2], slots[1 - step % 2], kLong) != ncclSuccess) {
      return kNotWell;
    }
  }
  const bool is_right =
      rank.values(slots[(num_ranks - 1) % 2], kLong) == counted_from(kStride * rank.next(), kLong);
  return is_right ? kAllWell : kNotWell;
}

TEST_F(NcclProcesses, PassMemoryAroundARing) {
  for (const int num_ranks : {2, 3, 4}) {
    const ncclUniqueId id = unique_id();
    std::vector<pid_t> children;
    for (int number = 0; number < num_ranks; ++number) {
      children.push_back(start(number, [&](int me) { return pass_around(me, num_ranks, id); }));
    }
    for (const pid_t child : children) EXPECT_EQ(WEXITSTATUS(status_of(child)), kAllWell);
    EXPECT_EQ(num_names(), 0);
  }
}

TEST_F(NcclProcesses, ThatDieAreNoticed) {
  set_fabric({.notices_lost_peers = true});
  const ncclUniqueId id = unique_id();
  const pid_t child = start(1, [&](int me) {
    Rank rank(me, 2);
    if (rank.init(id) != ncclSuccess) return kNotWell;
    return raise(SIGKILL);
  });
  Rank rank(0, 2);
  ASSERT_EQ(rank.init(id), ncclSuccess);
  EXPECT_EQ(num_names(), 0) << "the name goes when everybody is there";
  ASSERT_EQ(rank.receive(rank.memory(1), 1, 1), ncclSuccess);
  EXPECT_TRUE(WIFSIGNALED(status_of(child)));

  EXPECT_EQ(rank.wait_for_async_error(), ncclRemoteError);

  EXPECT_EQ(rank.error(), "rank 0 has lost rank 1");
  EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
  rank.communicator = nullptr;
  EXPECT_EQ(cudaStreamSynchronize(rank.stream()), cudaSuccess);
}

TEST_F(NcclProcesses, ThatDieAloneLeaveNothingForLong) {
  char name[NCCL_UNIQUE_ID_BYTES + 16] = "";
  int names[2];
  ASSERT_EQ(pipe(names), 0);
  const pid_t child = start(0, [&](int) {
    const ncclUniqueId id = unique_id();
    Rank rank(0, 2);
    rank.init_without_blocking(id);
    std::snprintf(name, sizeof(name), "/dev/shm/%s", id.internal);
    while (access(name, F_OK) != 0) std::this_thread::yield();
    const bool is_told = write(names[1], name, sizeof(name)) == sizeof(name);
    return is_told ? raise(SIGKILL) : kNotWell;
  });
  ASSERT_EQ(read(names[0], name, sizeof(name)), static_cast<ssize_t>(sizeof(name)));
  EXPECT_TRUE(WIFSIGNALED(status_of(child)));
  EXPECT_EQ(access(name, F_OK), 0) << "nobody was there to remove it";

  unique_id();

  EXPECT_NE(access(name, F_OK), 0) << "the next one to come does";
  close(names[0]);
  close(names[1]);
}

}  // namespace
}  // namespace cpattn::fake_nccl
