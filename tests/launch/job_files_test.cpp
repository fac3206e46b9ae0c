#include "launch/job_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "src/base/error.h"

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

TEST(PrivateDirectory, SaysWhyItCannotBeMade) {
  const PrivateDirectory directory;
  const std::string file = directory.path() + "/file";
  std::ofstream{file};
  const char* const before = std::getenv("TMPDIR");
  const std::string restored = before == nullptr ? "" : before;
  ::setenv("TMPDIR", file.c_str(), 1);
  errno = 0;

  std::string said;
  try {
    const PrivateDirectory another;
  } catch (const InvalidArgument& error) {
    said = error.what();
  }
  restored.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", restored.c_str(), 1);

  EXPECT_NE(said.find(file + ": Not a directory"), std::string::npos) << said;
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
