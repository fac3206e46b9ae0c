#include "launch/job_files.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/output_file.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

std::string record_path(const std::string& directory, int rank, const char* what) {
  return directory + "/rank" + std::to_string(rank) + "." + what;
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

PrivateDirectory::PrivateDirectory() {
  const char* parent = std::getenv("TMPDIR");
  const std::string base = parent != nullptr && *parent != '\0' ? parent : "/tmp";
  path_ = base + "/cpattn-XXXXXX";
  const bool is_made = ::mkdtemp(path_.data()) != nullptr;  // before errno is read
  require(is_made, "cannot make a temporary directory in ", base, ": ", std::strerror(errno),
          " (TMPDIR chooses another place)");
}

PrivateDirectory::~PrivateDirectory() { remove(); }

std::string PrivateDirectory::make_inside(std::string_view name) const {
  const std::string path = path_ + "/" + std::string(name);
  std::filesystem::create_directory(path);
  return path;
}

void PrivateDirectory::remove() noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void write_started(const std::string& directory, int rank) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the rank does not outlive the mpirun that started it
  write_atomically(record_path(directory, rank, "started"),
                   std::to_string(::getpid()) + "\n" + host_name() + "\n");
}

void write_ended(const std::string& directory, int rank, int exit_code, std::string_view message) {
  write_atomically(record_path(directory, rank, "ended"),
                   std::to_string(exit_code) + "\n" + std::string(message));
}

std::vector<RankRecord> read_records(const std::string& directory, int num_ranks) {
  std::vector<RankRecord> records(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    RankRecord& record = records[static_cast<std::size_t>(rank)];
    record.rank = rank;
    std::ifstream started(record_path(directory, rank, "started"));
    record.has_started = static_cast<bool>(started >> record.pid >> record.host);
    std::ifstream ended(record_path(directory, rank, "ended"));
    if (!(ended >> record.exit_code)) continue;
    record.has_ended = true;
    ended.ignore(1);
    std::ostringstream rest;
    rest << ended.rdbuf();
    record.message = rest.str();
  }
  return records;
}

TerminationNote::TerminationNote(std::string directory, int rank)
    : stop_fd_(::eventfd(0, EFD_CLOEXEC)) {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  const int signal_fd = ::signalfd(-1, &set, SFD_CLOEXEC);
  watcher_ = std::thread([stop_fd = stop_fd_, signal_fd, directory = std::move(directory), rank] {
    std::array<pollfd, 2> sources{pollfd{stop_fd, POLLIN, 0}, pollfd{signal_fd, POLLIN, 0}};
    while (::poll(sources.data(), sources.size(), -1) < 0 && errno == EINTR) {
    }
    if (sources[1].revents != 0) {
      try {
        write_ended(directory, rank, 128 + SIGTERM, "ended by SIGTERM");
      } catch (...) {  // the directory is gone with the launcher: nobody is left to tell
      }
      ::_exit(128 + SIGTERM);
    }
    ::close(signal_fd);
  });
}

TerminationNote::~TerminationNote() {
  const std::uint64_t one = 1;
  if (::write(stop_fd_, &one, sizeof(one)) == sizeof(one)) watcher_.join();
  ::close(stop_fd_);
}

}  // namespace cpattn
