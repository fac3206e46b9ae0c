#include "launch/output_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// Whether writing aside and renaming would put a regular file in the place of something else, as
/// of /dev/null.
bool must_be_written_through(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

std::string partial_of(const std::string& path) {
  return fmt::format("{}.partial.{}", path, ::getpid());
}

/// Standard output, when the path leads there: opened anew, a redirected one would be written from
/// its beginning.
int open_through(const std::string& path) {
  struct stat there {};
  struct stat output {};
  const bool is_output = ::stat(path.c_str(), &there) == 0 &&
                         ::fstat(STDOUT_FILENO, &output) == 0 && there.st_dev == output.st_dev &&
                         there.st_ino == output.st_ino;
  if (is_output) return ::dup(STDOUT_FILENO);
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

bool write_through(const std::string& path, std::string_view text) {
  const int descriptor = open_through(path);
  if (descriptor < 0) return false;
  const bool is_written = write_all(descriptor, text);
  const int error = errno;
  const bool is_closed = ::close(descriptor) == 0;
  if (!is_written) errno = error;
  return is_written && is_closed;
}

bool write_aside(const std::string& path, std::string_view text) {
  const std::string partial = partial_of(path);
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (file && std::rename(partial.c_str(), path.c_str()) == 0) return true;
  const int error = errno;
  std::remove(partial.c_str());
  errno = error;
  return false;
}

}  // namespace

void write_atomically(const std::string& path, std::string_view text) {
  const bool is_written =
      must_be_written_through(path) ? write_through(path, text) : write_aside(path, text);
  if (is_written) return;
  const std::string why = std::strerror(errno);
  throw InternalError("cannot write " + path + ": " + why);
}

void require_writable(const std::string& path) {
  struct stat status {};
  const bool is_there = ::stat(path.c_str(), &status) == 0;
  if (is_there && S_ISFIFO(status.st_mode)) return;  // its reader would take a try for the end
  const bool is_through = must_be_written_through(path);
  if (is_through && !is_there) return;  // a link to where nothing is yet
  const std::string tried =
      is_there && (is_through || S_ISDIR(status.st_mode)) ? path : partial_of(path);
  const int descriptor =
      ::open(tried.c_str(),
             O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (tried == path ? 0 : O_CREAT), 0666);
  const std::string why = descriptor < 0 ? std::strerror(errno) : "";
  if (descriptor >= 0) ::close(descriptor);
  if (tried != path) std::remove(tried.c_str());
  require(descriptor >= 0, "cannot write ", path, ": ", why);
}

void hold_standard_streams() noexcept {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest number is taken. Opened the wrong way round, it fails as a closed one does.
    ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace cpattn
