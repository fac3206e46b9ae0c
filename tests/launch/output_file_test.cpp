#include "launch/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>  // makedev
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "src/base/error.h"

namespace cpattn {
namespace {

namespace fs = std::filesystem;

class OutputFile : public ::testing::Test {
 protected:
  OutputFile()
      : folder_(fs::temp_directory_path() / ("cpattn_output." + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~OutputFile() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  static std::string text_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

TEST_F(OutputFile, IsReplacedWhole) {
  write_atomically(path("a"), "old text, longer");
  write_atomically(path("a"), "new");

  EXPECT_EQ(text_of(path("a")), "new");
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(OutputFile, WhatIsNotAFileIsWrittenThroughAndStays) {
  write_atomically(path("target"), "old text, longer");
  fs::create_symlink("target", path("link"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = ::open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);

  write_atomically(path("link"), "new");
  write_atomically(path("pipe"), "for the reader");
  std::array<char, 64> buffer{};
  const ssize_t count = ::read(reader, buffer.data(), buffer.size());
  ::close(reader);

  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(text_of(path("target")), "new");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(std::string(buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0))),
            "for the reader");
}

/// The device itself where we may make one, lest a mistake hits the machine's; else a link to that.
void make_device(const std::string& path, unsigned minor, const char* device) {
  const bool is_made = ::mknod(path.c_str(), S_IFCHR | 0666, makedev(1, minor)) == 0;
  const int opened = is_made ? ::open(path.c_str(), O_WRONLY) : -1;
  if (opened >= 0) {
    ::close(opened);
    return;
  }
  fs::remove(path);
  fs::create_symlink(device, path);
}

TEST_F(OutputFile, DevicesStayDevices) {
  make_device(path("null"), 3, "/dev/null");
  make_device(path("full"), 7, "/dev/full");

  write_atomically(path("null"), "x");
  EXPECT_THROW(write_atomically(path("full"), "x"), InternalError);
  require_writable(path("null"));

  EXPECT_TRUE(fs::is_character_file(path("null")));
  EXPECT_TRUE(fs::is_character_file(path("full")));
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(OutputFile, APlaceThatCannotBeWrittenIsRefusedBeforeTheWork) {
  fs::create_directory(path("folder"));
  fs::create_directory_symlink("folder", path("link"));
  write_atomically(path("a"), "stays");

  for (const std::string& bad : {path("missing/a"), path("folder"), path("link"), path("a/b")}) {
    EXPECT_THROW(require_writable(bad), InvalidArgument) << bad;
    EXPECT_THROW(write_atomically(bad, "x"), InternalError) << bad;
  }
  require_writable(path("a"));
  require_writable(path("new"));

  EXPECT_EQ(text_of(path("a")), "stays");
  EXPECT_FALSE(fs::exists(path("new")));
  EXPECT_EQ(num_files(), 3U);
}

}  // namespace
}  // namespace cpattn
