// A child process in its own group, watched until it ends: signals are passed on, deadlines end it,
// and nothing of it is left behind.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/mpirun.h"
#include "src/comm/communicator.h"  // Seconds

namespace cpattn {

/// Blocks SIGINT, SIGTERM and SIGHUP for its lifetime (in this thread and those it starts) so that
/// they can be asked for instead of ending the process half way. One that was ignored before stays
/// so: under nohup the end of a session is no matter.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// The signal that came first, waiting up to `patience` for one; 0 when there is none. A signal
  /// that came once stays.
  int pending(Seconds patience);

  /// Ends this process by the signal that came, as if it had not been held back.
  [[noreturn]] void die_by(int signal);

 private:
  int signal_fd_ = -1;
  int received_ = 0;
};

/// How a child ended.
struct ProcessOutcome {
  int exit_code = 0;  ///< as a shell says it: 128 + number for a signal
  bool was_ended_by_us = false;
  std::string why_ended;  ///< which deadline, or which signal was passed on
  std::string output;     ///< the end of what it wrote to stdout and stderr
  double seconds = 0.0;
};

/// What watches over a child besides its own deadline.
struct ProcessWatch {
  Seconds time_limit{3600.0};
  /// Called about ten times a second with the child's pid; a text ends the child, saying why.
  std::function<std::string(pid_t)> look;
  /// Pids outside the child's group that must not outlive it.
  std::function<std::vector<pid_t>()> descendants;
};

/// Starts the process with stdin from /dev/null, in its own group and tied to our life, and waits.
///
/// Signals  one that `signals` received goes to the group; a child that has not ended 5 s later, or
///          after a deadline, is killed, and its descendants with it.
/// Errors   Unsupported when it cannot be started.
ProcessOutcome run_process(const ProcessSpec& spec, SignalWatch& signals,
                           const ProcessWatch& watch);

/// Whether a process is stopped (SIGSTOP, a debugger), read from /proc; false when it is gone.
bool is_stopped(pid_t pid);

/// Children of a process, whichever of its threads started them, read from /proc; none when it is
/// gone, nothing when this system does not say.
std::optional<std::vector<pid_t>> children_of(pid_t pid);

/// A variable of another process's environment as it was started; empty when it cannot be read.
std::string environment_of(pid_t pid, const std::string& name);

/// Runs `work` in another thread while signals are watched; a signal calls `clean_up` and ends this
/// process by it. Rethrows what work threw.
void run_interruptibly(SignalWatch& signals, const std::function<void()>& work,
                       const std::function<void()>& clean_up);

}  // namespace cpattn
