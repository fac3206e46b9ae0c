#include "launch/mpirun.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace cpattn {
namespace {

const LaunchFacts kTwoCores{.cores = 2, .has_mpi = true, .mpirun = "/usr/bin/mpirun"};

std::string line_of(const ProcessSpec& spec) {
  std::string line;
  for (const std::string& argument : spec.arguments) line += argument + " ";
  return line;
}

bool sets(const ProcessSpec& spec, const std::string& name, const std::string& value) {
  return std::find(spec.environment.begin(), spec.environment.end(), std::pair(name, value)) !=
         spec.environment.end();
}

TEST(BC_089, MoreRanksThanCoresAreOversubscribedAndYield) {
  const ProcessSpec spec = mpirun_process(kTwoCores, 4, 1, {"/bin/cpattn", "parity"});
  const std::string line = line_of(spec);

  EXPECT_TRUE(line.starts_with("/usr/bin/mpirun -np 4 --oversubscribe --bind-to none "));
  EXPECT_NE(line.find("--mca mpi_yield_when_idle 1 "), std::string::npos);
  EXPECT_TRUE(line.ends_with("/bin/cpattn parity "));
  EXPECT_EQ(line.find("--host"), std::string::npos);
}

TEST(BC_090, BothVariablesAreSetForRootAndOnlyForRoot) {
  LaunchFacts root = kTwoCores;
  root.is_root = true;
  const ProcessSpec as_root = mpirun_process(root, 2, 1, {"x"});
  const ProcessSpec as_user = mpirun_process(kTwoCores, 2, 1, {"x"});

  EXPECT_TRUE(sets(as_root, "OMPI_ALLOW_RUN_AS_ROOT", "1"));
  EXPECT_TRUE(sets(as_root, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"));
  EXPECT_FALSE(sets(as_user, "OMPI_ALLOW_RUN_AS_ROOT", "1"));
}

TEST(BC_094, SharedMemoryNeedsNoPermissionToReadAnotherProcess) {
  const std::string line = line_of(mpirun_process(kTwoCores, 2, 1, {"x"}));

  EXPECT_NE(line.find("--mca btl_vader_single_copy_mechanism none "), std::string::npos);
}

TEST(Mpirun, StartsRanksHereWhateverBatchSystemItIsIn) {
  const std::string line = line_of(mpirun_process(kTwoCores, 2, 1, {"x"}));

  EXPECT_NE(line.find("--mca plm isolated "), std::string::npos);
  EXPECT_NE(line.find("--mca ras ^slurm,"), std::string::npos);
}

TEST(Mpirun, BindsOnlyWhereEveryThreadHasItsOwnCore) {
  const LaunchFacts eight{.cores = 8, .has_mpi = true, .mpirun = "/usr/bin/mpirun"};
  LaunchFacts pinned = eight;
  pinned.has_all_cores = false;
  const auto binds = [](const ProcessSpec& spec) {
    return line_of(spec).find("--bind-to core") != std::string::npos;
  };

  EXPECT_TRUE(binds(mpirun_process(eight, 4, 1, {"x"})));
  EXPECT_FALSE(binds(mpirun_process(eight, 4, 2, {"x"})));
  EXPECT_FALSE(binds(mpirun_process(eight, 16, 1, {"x"})));
  EXPECT_FALSE(binds(mpirun_process(pinned, 4, 1, {"x"})));
}

TEST(Mpirun, ThreadsArePassedOn) {
  const ProcessSpec spec = mpirun_process(kTwoCores, 1, 2, {"x"});

  EXPECT_TRUE(sets(spec, "OMP_NUM_THREADS", "2"));
  EXPECT_NE(line_of(spec).find("-x OMP_NUM_THREADS "), std::string::npos);
}

TEST(Mpirun, SaysWhatIsMissingAndWhatToDo) {
  EXPECT_EQ(why_no_mpirun(kTwoCores), "");
  EXPECT_NE(why_no_mpirun({.has_mpi = true, .mpirun = ""}).find("install openmpi-bin"),
            std::string::npos);
  EXPECT_NE(why_no_mpirun({.mpirun = "/usr/bin/mpirun"}).find("no MPI"), std::string::npos);
}

TEST(Mpirun, FindsProgramsInPath) {
  EXPECT_EQ(find_in_path("sh", "/nonexistent:/bin"), "/bin/sh");
  EXPECT_EQ(find_in_path("no-such-program", "/bin:/usr/bin"), "");
}

TEST(Mpirun, ReadsWhoDied) {
  const auto killed = find_death_notice(
      "some noise\nmpirun noticed that process rank 2 with PID 4711 on node here exited on signal "
      "9 "
      "(Killed).\n");
  const auto left = find_death_notice(
      "mpirun has exited due to process rank 1 with PID 0 on\nnode here exiting improperly. There "
      "are three reasons");

  ASSERT_TRUE(killed.has_value());
  EXPECT_EQ(killed->rank, 2);
  EXPECT_EQ(killed->text, "exited on signal 9 (Killed)");
  ASSERT_TRUE(left.has_value());
  EXPECT_EQ(left->rank, 1);
  EXPECT_EQ(left->text, "exited without MPI_Finalize");
  EXPECT_FALSE(find_death_notice("all is well").has_value());
}

}  // namespace
}  // namespace cpattn
