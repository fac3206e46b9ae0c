#include "launch/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>

#include "src/base/error.h"

extern char** environ;

namespace cpattn {
namespace {

constexpr std::size_t kKeptOutput = 16384;
constexpr Seconds kGrace{5.0};  ///< between asking a child to end and killing it
constexpr int kPollMs = 100;

/// Whether whoever started us had this signal ignored, as nohup has SIGHUP. Blocked for a signalfd
/// it would arrive nevertheless.
bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

sigset_t watched_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (!is_ignored(signal)) ::sigaddset(&set, signal);
  }
  return set;
}

/// Environment of the child: ours, with some variables replaced.
std::vector<std::string> child_environment(const ProcessSpec& spec) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    bool is_replaced = false;
    for (const auto& [name, value] : spec.environment) {
      is_replaced |= text.compare(0, name.size() + 1, name + "=") == 0;
    }
    if (!is_replaced) entries.push_back(text);
  }
  for (const auto& [name, value] : spec.environment) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// Between fork and exec: only calls that are safe there.
[[noreturn]] void become(const std::vector<char*>& arguments, const std::vector<char*>& environment,
                         int output_fd, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(127);
  const sigset_t set = watched_signals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  const int null_fd = ::open("/dev/null", O_RDONLY);
  ::dup2(null_fd, 0);
  ::dup2(output_fd, 1);
  ::dup2(output_fd, 2);
  ::execve(arguments[0], arguments.data(), environment.data());
  ::_exit(127);
}

/// One running child.
class Child {
 public:
  explicit Child(const ProcessSpec& spec) : started_(Clock::now()) {
    std::array<int, 2> pipe_fds{};
    const bool is_piped = ::pipe2(pipe_fds.data(), O_CLOEXEC | O_NONBLOCK) == 0;
    require<Unsupported>(is_piped, "cannot make a pipe: ", std::strerror(errno));
    std::vector<std::string> arguments = spec.arguments;
    std::vector<std::string> environment = child_environment(spec);
    const std::vector<char*> argument_list = pointers_to(arguments);
    const std::vector<char*> environment_list = pointers_to(environment);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) become(argument_list, environment_list, pipe_fds[1], parent);
    const int error = errno;
    ::close(pipe_fds[1]);
    output_fd_ = pipe_fds[0];
    require<Unsupported>(pid_ > 0, "cannot start ", spec.arguments[0], ": ", std::strerror(error));
    ::setpgid(pid_, pid_);  // both sides do it, whoever comes first
  }
  ~Child() {
    if (!has_ended_) {
      signal_group(SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(output_fd_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  double seconds() const { return Seconds(Clock::now() - started_).count(); }
  void signal_group(int signal) const { ::kill(-pid_, signal); }
  void wake_group() const { ::kill(-pid_, SIGCONT); }

  /// Reads what there is and says whether the child has ended.
  bool has_ended(int wait_ms) {
    pollfd readable{output_fd_, POLLIN, 0};
    ::poll(&readable, is_output_open_ ? 1 : 0, wait_ms);
    read_output();
    int status = 0;
    if (!has_ended_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      has_ended_ = true;
      exit_code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      read_output();
    }
    return has_ended_;
  }
  int exit_code() const { return exit_code_; }
  const std::string& output() const { return output_; }

 private:
  void read_output() {
    std::array<char, 4096> buffer{};
    ssize_t count = 0;
    while ((count = ::read(output_fd_, buffer.data(), buffer.size())) > 0) {
      output_.append(buffer.data(), static_cast<std::size_t>(count));
      if (output_.size() > 2 * kKeptOutput) output_.erase(0, output_.size() - kKeptOutput);
    }
    if (count == 0) is_output_open_ = false;  // closed by the child: polling it would not wait
  }

  Clock::time_point started_;
  pid_t pid_ = -1;
  int output_fd_ = -1;
  bool is_output_open_ = true;
  bool has_ended_ = false;
  int exit_code_ = 0;
  std::string output_;
};

/// Asks, waits, kills; afterwards nothing of the child runs.
void end_child(Child& child, int signal, const ProcessWatch& watch) {
  child.signal_group(signal);
  child.wake_group();  // a stopped process takes signals only once it goes on
  const Clock::time_point deadline = deadline_after(kGrace);
  while (!child.has_ended(kPollMs) && Clock::now() < deadline) {
  }
  child.signal_group(SIGKILL);
  if (watch.descendants) {
    for (const pid_t pid : watch.descendants()) ::kill(pid, SIGKILL);
  }
  while (!child.has_ended(kPollMs)) {
  }
}

}  // namespace

SignalWatch::SignalWatch() {
  const sigset_t set = watched_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal_fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  require<Unsupported>(signal_fd_ >= 0, "cannot watch signals: ", std::strerror(errno));
}

SignalWatch::~SignalWatch() {
  ::close(signal_fd_);
  const sigset_t set = watched_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

int SignalWatch::pending(Seconds patience) {
  if (received_ != 0) return received_;
  pollfd readable{signal_fd_, POLLIN, 0};
  if (::poll(&readable, 1, static_cast<int>(patience.count() * 1000.0)) <= 0) return 0;
  signalfd_siginfo information{};
  if (::read(signal_fd_, &information, sizeof(information)) == sizeof(information)) {
    received_ = static_cast<int>(information.ssi_signo);
  }
  return received_;
}

void SignalWatch::die_by(int signal) {
  ::signal(signal, SIG_DFL);
  const sigset_t set = watched_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  ::raise(signal);
  ::_exit(128 + signal);
}

ProcessOutcome run_process(const ProcessSpec& spec, SignalWatch& signals,
                           const ProcessWatch& watch) {
  Child child(spec);
  ProcessOutcome outcome;
  while (!child.has_ended(kPollMs)) {
    int signal = signals.pending(Seconds(0));
    if (signal != 0) {
      outcome.why_ended = std::string("signal ") + ::strsignal(signal) + " was passed on";
    } else if (child.seconds() > watch.time_limit.count()) {
      outcome.why_ended = detail::concat("it had not ended after ", watch.time_limit.count(), " s");
    } else if (watch.look) {
      outcome.why_ended = watch.look(child.pid());
    }
    if (outcome.why_ended.empty()) continue;
    outcome.was_ended_by_us = true;
    end_child(child, signal != 0 ? signal : SIGTERM, watch);
  }
  outcome.exit_code = child.exit_code();
  outcome.output = child.output();
  outcome.seconds = child.seconds();
  if (watch.descendants) {  // mpirun takes its ranks with it; this is for the day it does not
    for (const pid_t pid : watch.descendants()) ::kill(pid, SIGKILL);
  }
  return outcome;
}

bool is_stopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const std::size_t name_end = text.rfind(')');  // the name may hold anything, brackets included
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  const char state = text[name_end + 2];
  return state == 'T' || state == 't';
}

std::optional<std::vector<pid_t>> children_of(pid_t pid) {
  static const bool is_told = std::ifstream("/proc/thread-self/children").is_open();
  if (!is_told) return std::nullopt;
  std::vector<pid_t> children;
  std::error_code ignored;
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", ignored)) {
    std::ifstream file(task.path() / "children");
    children.insert(children.end(), std::istream_iterator<pid_t>(file),
                    std::istream_iterator<pid_t>());
  }
  return children;
}

std::string environment_of(pid_t pid, const std::string& name) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ");
  for (std::string entry; std::getline(file, entry, '\0');) {
    if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
  }
  return "";
}

void run_interruptibly(SignalWatch& signals, const std::function<void()>& work,
                       const std::function<void()>& clean_up) {
  std::future<void> done = std::async(std::launch::async, work);
  while (done.wait_for(std::chrono::milliseconds(kPollMs)) != std::future_status::ready) {
    if (const int signal = signals.pending(Seconds(0)); signal != 0) {
      clean_up();
      signals.die_by(signal);
    }
  }
  done.get();
}

}  // namespace cpattn
