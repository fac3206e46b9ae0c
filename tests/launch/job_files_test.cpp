#include "launch/job_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace cpattn {
namespace {

TEST(PrivateDirectory, IsOursAloneAndGoesAway) {
  std::string path;
  {
    const PrivateDirectory directory;
    path = directory.path();
    std::ofstream(directory.make_inside("cp2") + "/file") << "text";

    EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
  }

  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(RankRecords, SilenceIsToldFromAnEnd) {
  const PrivateDirectory directory;
  write_started(directory.path(), 0);
  write_ended(directory.path(), 0, 4, "two lines\nof text");
  write_started(directory.path(), 1);

  const std::vector<RankRecord> records = read_records(directory.path(), 3);

  EXPECT_EQ(records[0].pid, ::getpid());
  EXPECT_TRUE(records[0].has_ended);
  EXPECT_EQ(records[0].exit_code, 4);
  EXPECT_EQ(records[0].message, "two lines\nof text");
  EXPECT_TRUE(records[1].has_started);
  EXPECT_FALSE(records[1].has_ended);
  EXPECT_FALSE(records[2].has_started);
}

}  // namespace
}  // namespace cpattn
