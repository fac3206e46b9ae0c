#include "launch/process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "src/base/error.h"

namespace cpattn {
namespace {

ProcessSpec shell(const std::string& script) { return {{"/bin/sh", "-c", script}, {}}; }

ProcessOutcome run(const std::string& script, const ProcessWatch& watch = {}) {
  SignalWatch signals;
  return run_process(shell(script), signals, watch);
}

TEST(RunProcess, ReturnsWhatTheChildSaidAndItsExitCode) {
  const ProcessOutcome outcome = run("echo out; echo err >&2; exit 7");

  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_NE(outcome.output.find("out"), std::string::npos);
  EXPECT_NE(outcome.output.find("err"), std::string::npos);
  EXPECT_FALSE(outcome.was_ended_by_us);
}

TEST(RunProcess, ASignalIsANonZeroExit) { EXPECT_EQ(run("kill -9 $$").exit_code, 128 + SIGKILL); }

TEST(RunProcess, AProgramThatIsNotThereFails) {
  SignalWatch signals;
  const ProcessOutcome outcome = run_process({{"/nonexistent/program"}, {}}, signals, {});

  EXPECT_EQ(outcome.exit_code, 127);
}

TEST(RunProcess, VariablesAreReplaced) {
  SignalWatch signals;
  ProcessSpec spec = shell("echo value=$CPATTN_PROCESS_TEST; echo path=$PATH");
  spec.environment = {{"CPATTN_PROCESS_TEST", "42"}, {"PATH", "/only"}};

  const ProcessOutcome outcome = run_process(spec, signals, {});

  EXPECT_NE(outcome.output.find("value=42"), std::string::npos);
  EXPECT_NE(outcome.output.find("path=/only\n"), std::string::npos);
}

TEST(RunProcess, EndsAChildAndItsGroupAtTheDeadline) {
  const ProcessOutcome outcome =
      run("sleep 100 & echo $!; wait", {.time_limit = Seconds(0.3), .look = {}, .descendants = {}});

  EXPECT_TRUE(outcome.was_ended_by_us);
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_LT(outcome.seconds, 10.0);
  EXPECT_NE(outcome.why_ended.find("0.3 s"), std::string::npos);
  const pid_t grandchild = std::stoi(outcome.output);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::ifstream state("/proc/" + std::to_string(grandchild) + "/stat");
  std::string text;
  std::getline(state, text);
  EXPECT_TRUE(text.empty() || text.find(") Z") != std::string::npos) << text;
}

TEST(RunProcess, KillsAChildThatIgnoresBeingAsked) {
  const ProcessOutcome outcome = run("trap '' TERM; while :; do sleep 0.1; done",
                                     {.time_limit = Seconds(0.3), .look = {}, .descendants = {}});

  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL);
}

TEST(RunProcess, EndsAStoppedChildWhenToldTo) {
  const ProcessWatch watch{
      .time_limit = Seconds(60.0),
      .look = [](pid_t pid) { return is_stopped(pid) ? std::string("stopped") : std::string(); },
      .descendants = {}};

  const ProcessOutcome outcome = run("kill -STOP $$", watch);

  EXPECT_EQ(outcome.why_ended, "stopped");
  EXPECT_LT(outcome.seconds, 20.0);
}

TEST(RunProcess, PassesASignalOn) {
  SignalWatch signals;
  std::jthread sender([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::kill(::getpid(), SIGINT);
  });

  const ProcessOutcome outcome =
      run_process(shell("trap 'echo got it; exit 5' INT; while :; do sleep 0.05; done"), signals,
                  {.time_limit = Seconds(60.0), .look = {}, .descendants = {}});

  EXPECT_EQ(outcome.exit_code, 5);
  EXPECT_NE(outcome.output.find("got it"), std::string::npos);
  EXPECT_EQ(signals.pending(Seconds(0)), SIGINT);
}

TEST(SignalWatch, LeavesAloneWhatWasIgnored) {
  struct sigaction ignored {};
  struct sigaction before {};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(SIGHUP, &ignored, &before);
  {
    SignalWatch signals;
    ::raise(SIGHUP);

    EXPECT_EQ(signals.pending(Seconds(0)), 0);
  }
  ::sigaction(SIGHUP, &before, nullptr);
}

TEST(RunInterruptibly, HandsAnExceptionOn) {
  SignalWatch signals;

  EXPECT_THROW(run_interruptibly(
                   signals, [] { throw InvalidArgument("inside"); }, [] {}),
               InvalidArgument);
}

}  // namespace
}  // namespace cpattn
