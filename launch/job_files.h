// What the launcher and the ranks it started tell each other: small files in a private directory.
//
// A rank says when it starts and how it ended; rank 0 delivers each lane's result as soon as it is
// complete. Files appear whole (written aside and renamed), so what is there can be trusted, and a
// rank that dies leaves its silence as evidence.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cpattn {

/// A directory only this user can read, removed with all it holds at the end.
class PrivateDirectory {
 public:
  /// Under TMPDIR, or /tmp. InvalidArgument when it cannot be made.
  PrivateDirectory();
  ~PrivateDirectory();
  PrivateDirectory(const PrivateDirectory&) = delete;
  PrivateDirectory& operator=(const PrivateDirectory&) = delete;

  const std::string& path() const { return path_; }
  /// Makes a directory inside and returns its path.
  std::string make_inside(std::string_view name) const;
  void remove() noexcept;

 private:
  std::string path_;
};

/// What is known of one rank of a job.
struct RankRecord {
  int rank = 0;
  bool has_started = false;
  pid_t pid = 0;
  std::string host;
  bool has_ended = false;  ///< it said how it ended
  int exit_code = 0;
  std::string message;  ///< why, when exit_code is not 0
};

void write_started(const std::string& directory, int rank);
void write_ended(const std::string& directory, int rank, int exit_code, std::string_view message);
std::vector<RankRecord> read_records(const std::string& directory, int num_ranks);

/// Says "ended by SIGTERM" for a rank that mpirun takes down, so that it can be told from the rank
/// that died by itself. Blocks SIGTERM; make it before other threads start.
class TerminationNote {
 public:
  TerminationNote(std::string directory, int rank);
  ~TerminationNote();
  TerminationNote(const TerminationNote&) = delete;
  TerminationNote& operator=(const TerminationNote&) = delete;

 private:
  int stop_fd_ = -1;
  std::thread watcher_;
};

}  // namespace cpattn
