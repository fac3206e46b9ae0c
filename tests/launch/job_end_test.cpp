#include "launch/job_end.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cpattn {
namespace {

RankRecord ended(int rank, int exit_code = 0, const std::string& message = "") {
  return {rank, true, 100 + rank, "here", true, exit_code, message};
}

RankRecord silent(int rank) { return {rank, true, 100 + rank, "here", false, 0, ""}; }

RankRecord taken_down(int rank) { return ended(rank, 143, "ended by SIGTERM"); }

ProcessOutcome outcome(int exit_code, const std::string& output = "") {
  ProcessOutcome result;
  result.exit_code = exit_code;
  result.output = output;
  return result;
}

TEST(Explain, IsContentOnlyWhenEveryRankAndTheJobEndedWell) {
  EXPECT_EQ(explain(outcome(0), {ended(0), ended(1)}).failure, FailureKind::none);
  EXPECT_EQ(explain(outcome(0, "harmless noise"), {ended(0)}).failure, FailureKind::none);
  EXPECT_EQ(explain(outcome(1), {ended(0), ended(1)}).failure, FailureKind::internal);
}

TEST(Explain, ExitCodeZeroDoesNotHideAMissingRank) {
  const JobEnd end = explain(outcome(0), {ended(0), silent(1)});

  EXPECT_EQ(end.failure, FailureKind::internal);
  ASSERT_EQ(end.reasons.size(), 1u);
  EXPECT_EQ(end.reasons[0], "rank 1 (pid 101) ended without a word");
}

TEST(BC_095, TheRankThatFailedIsNamedAndThoseTakenDownAreNot) {
  const JobEnd end = explain(
      outcome(4), {taken_down(0), taken_down(1), ended(2, 4, "rank 2: boom"), taken_down(3)});

  ASSERT_EQ(end.reasons.size(), 1u);
  EXPECT_EQ(end.reasons[0], "rank 2: boom");
}

TEST(Explain, ARankThatWasKilledIsNamedWithItsSignal) {
  const std::string output =
      "mpirun noticed that process rank 2 with PID 102 on node here exited on signal 9 (Killed).";

  const JobEnd end =
      explain(outcome(137, output), {taken_down(0), silent(1), silent(2), taken_down(3)});

  ASSERT_EQ(end.reasons.size(), 1u);
  EXPECT_EQ(end.reasons[0], "rank 2 (pid 102) ended without a word: exited on signal 9 (Killed)");
}

TEST(Explain, TheSameMessageFromSeveralRanksIsSaidOnce) {
  const JobEnd end =
      explain(outcome(2), {ended(0, 2, "no such file"), ended(1, 2, "no such file")});

  EXPECT_EQ(end.failure, FailureKind::bad_input);
  ASSERT_EQ(end.reasons.size(), 1u);
  EXPECT_EQ(end.reasons[0], "rank 0: no such file");
}

TEST(Explain, WhatMpirunSaidIsShownWhenNoRankStarted) {
  const JobEnd end = explain(outcome(1, "-----\nnot enough slots\n-----\n"), {RankRecord{}});

  ASSERT_EQ(end.reasons.size(), 1u);
  EXPECT_EQ(end.reasons[0], "no rank started, exit code 1: not enough slots");
}

TEST(Explain, ADeadlineOfTheLauncherIsAFailure) {
  ProcessOutcome ended_by_us = outcome(0);
  ended_by_us.was_ended_by_us = true;
  ended_by_us.why_ended = "rank 1 has been stopped for 5.0 s";

  EXPECT_EQ(explain(ended_by_us, {ended(0), taken_down(1)}).reasons.at(0),
            "the launcher ended the job: rank 1 has been stopped for 5.0 s");
}

}  // namespace
}  // namespace cpattn
