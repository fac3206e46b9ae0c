#include "launch/job_end.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "launch/cli.h"
#include "launch/mpirun.h"

namespace cpattn {
namespace {

/// The last lines of what a job printed, rulers left out, for a failure nobody explained.
std::string last_lines(const std::string& output, std::size_t count) {
  std::istringstream stream(output);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    const bool is_ruler = line.find_first_not_of("- ") == std::string::npos;
    if (!is_ruler) lines.push_back(line);
  }
  std::string text;
  for (std::size_t i = lines.size() > count ? lines.size() - count : 0; i < lines.size(); ++i) {
    text += (text.empty() ? "" : " | ") + lines[i];
  }
  return text.empty() ? "it printed nothing" : text;
}

void add(JobEnd& end, FailureKind kind, std::string reason) {
  if (end.failure == FailureKind::none) end.failure = kind;
  end.reasons.push_back(std::move(reason));
}

/// What ranks said about their failure; ranks that saw the same thing say it once.
void add_said(const std::vector<RankRecord>& records, JobEnd& end) {
  std::set<std::string> said;
  for (const RankRecord& record : records) {
    const bool was_taken_down = record.exit_code == 128 + SIGTERM;
    if (!record.has_ended || record.exit_code == 0 || was_taken_down) continue;
    if (!said.insert(record.message).second) continue;
    const std::string who = fmt::format("rank {}: ", record.rank);
    const bool is_named = record.message.starts_with(who);
    add(end, failure_kind(record.exit_code), (is_named ? "" : who) + record.message);
  }
}

/// Ranks whose end is missing. Where mpirun names the first to go, the others it took down need no
/// mention.
void add_silent(const std::vector<RankRecord>& records, const std::string& output, JobEnd& end) {
  const auto notice = find_death_notice(output);
  for (const RankRecord& record : records) {
    if (record.has_ended || (notice && notice->rank != record.rank)) continue;
    if (record.has_started) {
      add(end, FailureKind::internal,
          fmt::format("rank {} (pid {}) ended without a word{}", record.rank, record.pid,
                      notice ? ": " + notice->text : ""));
    } else {
      add(end, FailureKind::internal, fmt::format("rank {} never started", record.rank));
    }
  }
  const bool is_complete = std::all_of(records.begin(), records.end(),
                                       [](const auto& record) { return record.has_ended; });
  if (!is_complete && end.reasons.empty() && notice) {
    add(end, FailureKind::internal, fmt::format("rank {} {}", notice->rank, notice->text));
  }
}

}  // namespace

FailureKind failure_kind(int exit_code) {
  if (exit_code == static_cast<int>(ExitCode::bad_input)) return FailureKind::bad_input;
  if (exit_code == static_cast<int>(ExitCode::unavailable)) return FailureKind::unavailable;
  return FailureKind::internal;
}

JobEnd explain(const ProcessOutcome& outcome, const std::vector<RankRecord>& records) {
  JobEnd end;
  const bool has_started = std::any_of(records.begin(), records.end(),
                                       [](const auto& record) { return record.has_started; });
  add_said(records, end);
  if (outcome.was_ended_by_us) {
    add(end, FailureKind::internal, "the launcher ended the job: " + outcome.why_ended);
  }
  if (has_started) {
    add_silent(records, outcome.output, end);
  } else if (end.reasons.empty()) {
    add(end, FailureKind::internal,
        fmt::format("no rank started, exit code {}: {}", outcome.exit_code,
                    last_lines(outcome.output, 8)));
  }
  if (outcome.exit_code != 0 && end.reasons.empty()) {
    add(end, failure_kind(outcome.exit_code),
        fmt::format("every rank ended well, but the job with exit code {}: {}", outcome.exit_code,
                    last_lines(outcome.output, 8)));
  }
  return end;
}

}  // namespace cpattn
