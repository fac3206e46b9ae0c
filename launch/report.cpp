#include "launch/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace cpattn {
namespace {

ExitCode exit_code_of(FailureKind failure) {
  switch (failure) {
    case FailureKind::none:
      return ExitCode::pass;
    case FailureKind::differs:
      return ExitCode::differs;
    case FailureKind::bad_input:
      return ExitCode::bad_input;
    case FailureKind::unavailable:
      return ExitCode::unavailable;
    case FailureKind::internal:
      return ExitCode::internal;
  }
  return ExitCode::internal;
}

constexpr std::array kColumns{"cp",       "sharding", "mask",     "dtype",
                              "schedule", "compared", "bit diff", "worst rel_l2",
                              "bound",    "seconds",  "exposed",  "verdict"};
using Cells = std::array<std::string, kColumns.size()>;

Cells cells_of(const LaneReport& lane) {
  Cells cells;
  cells.fill("-");
  cells[0] = fmt::format("{}{}", lane.cp, lane.is_baseline ? " (baseline)" : "");
  cells[1] = std::string(name_of(lane.sharding));
  cells[2] = std::string(name_of(lane.mask));
  cells[3] = std::string(name_of(lane.dtype));
  cells[4] = std::string(name_of(lane.schedule));
  if (lane.compared_elements() > 0) {
    cells[5] = fmt::format("{}", lane.compared_elements());
    cells[6] = fmt::format("{}", lane.bit_mismatch());
  }
  if (const TensorReport* worst = lane.worst()) {
    cells[7] = fmt::format("{:<3} {:.2e} {}/{}", worst->name, worst->worst_rel_l2,
                           worst->worst_head, worst->worst_chunk);
    cells[8] = fmt::format("{:.2e}", worst->bound);
  }
  if (!lane.ranks.empty()) {
    cells[9] = fmt::format("{:.3f}", lane.seconds());
    cells[10] = fmt::format("{:.3f}", lane.exposed_seconds());
  }
  cells[11] = lane.status == LaneStatus::passed   ? "pass"
              : lane.status == LaneStatus::failed ? "FAIL"
                                                  : "not evaluated";
  return cells;
}

std::string table_of(const std::vector<Cells>& rows) {
  std::array<std::size_t, kColumns.size()> widths{};
  for (std::size_t i = 0; i < widths.size(); ++i) {
    widths[i] = std::strlen(kColumns[i]);
    for (const Cells& row : rows) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  const auto add_line = [&](auto&& cell) {
    std::string line;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      line += fmt::format("{:<{}}  ", std::string(cell(i)), widths[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  };
  add_line([](std::size_t i) { return kColumns[i]; });
  for (const Cells& row : rows) add_line([&](std::size_t i) { return row[i]; });
  return text;
}

/// The lanes of one source under one heading.
std::string tables_by_source(const ParityReport& report) {
  std::vector<std::string> sources;
  for (const LaneReport& lane : report.lanes) {
    if (std::find(sources.begin(), sources.end(), lane.source) == sources.end()) {
      sources.push_back(lane.source);
    }
  }
  std::string text;
  for (const std::string& source : sources) {
    std::vector<Cells> rows;
    for (const LaneReport& lane : report.lanes) {
      if (lane.source == source) rows.push_back(cells_of(lane));
    }
    text += fmt::format("{}\n{}\n", source, table_of(rows));
  }
  return text;
}

/// Lane texts said once, with the lanes they hold for counted.
std::string distinct(const ParityReport& report, std::string LaneReport::*field) {
  std::vector<std::string> values;
  for (const LaneReport& lane : report.lanes) {
    const std::string& value = lane.*field;
    if (!value.empty() && std::find(values.begin(), values.end(), value) == values.end()) {
      values.push_back(value);
    }
  }
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : "; ") + value;
  return text.empty() ? "-" : text;
}

/// Bits that differ where none were promised are one line, not one per lane.
std::string notes_text(const ParityReport& report) {
  const auto count = std::count_if(report.lanes.begin(), report.lanes.end(), [](const auto& lane) {
    return !lane.bits_must_match && lane.bit_mismatch() > 0;
  });
  if (count == 0) return "";
  return fmt::format(
      "note: {} lane{} whose schedule or sharding promises no bits differ{} from one rank\n", count,
      count == 1 ? "" : "s", count == 1 ? "s" : "");
}

/// Why lanes did not pass: all reasons of the first ones, then how many more there are. Lanes that
/// were left out for the same reason say it once per CP size.
std::string reasons_text(const ParityReport& report) {
  constexpr int kMostLanes = 12;
  std::string text;
  int shown = 0;
  int hidden = 0;
  const LaneReport* previous = nullptr;
  for (const LaneReport& lane : report.lanes) {
    if (lane.reasons.empty()) continue;
    const bool repeats = previous != nullptr && previous->cp == lane.cp &&
                         lane.status == LaneStatus::not_evaluated &&
                         previous->status == lane.status && previous->reasons == lane.reasons;
    previous = &lane;
    if (repeats) continue;
    if (++shown > kMostLanes) {
      ++hidden;
      continue;
    }
    for (const std::string& reason : lane.reasons) {
      text += fmt::format("{}: {}: {}\n", name_of_status(lane.status), lane_name(lane), reason);
    }
  }
  if (hidden > 0) text += fmt::format("... and {} more; --report writes all of them\n", hidden);
  return text;
}

/// A line for each type: every tensor with its error in the lane where it is nearest to its bound.
std::string tensors_lines(const ParityReport& report) {
  std::string text;
  for (const auto& [dtype, dtype_name] : EnumNames<DType>::kValues) {
    std::vector<TensorReport> worst;
    for (const LaneReport& lane : report.lanes) {
      if (lane.dtype != dtype) continue;
      for (const TensorReport& tensor : lane.tensors) {
        const auto same = std::find_if(worst.begin(), worst.end(), [&](const TensorReport& other) {
          return other.name == tensor.name;
        });
        if (same == worst.end()) {
          worst.push_back(tensor);
        } else if (tensor.share_of_bound() > same->share_of_bound()) {
          *same = tensor;
        }
      }
    }
    if (worst.empty()) continue;
    text += fmt::format("  {:<4}", dtype_name);
    for (const TensorReport& tensor : worst) {
      text += fmt::format("  {} {:.1e}/{:.1e}", tensor.name, tensor.worst_rel_l2, tensor.bound);
    }
    text += "\n";
  }
  return text.empty() ? "" : "worst rel_l2/bound of all lanes:\n" + text;
}

std::string reference_line(const ParityReport& report) {
  std::int64_t compared = 0;
  std::int64_t total = 0;
  for (const LaneReport& lane : report.lanes) {
    for (const TensorReport& tensor : lane.tensors) {
      compared += tensor.reference_rows;
      total += tensor.total_rows;
    }
  }
  if (total == 0) return "reference: double precision, of no row: nothing was compared";
  if (compared == total) return "reference: double precision, every row of every tensor";
  return fmt::format(
      "reference: double precision, {} of {} rows (a fixed spread; --reference-rows "
      "changes how many)",
      compared, total);
}

}  // namespace

double TensorReport::share_of_bound() const {
  if (worst_rel_l2 == 0.0) return 0.0;
  return bound > 0.0 ? worst_rel_l2 / bound : std::numeric_limits<double>::infinity();
}

std::int64_t LaneReport::compared_elements() const {
  std::int64_t sum = 0;
  for (const TensorReport& tensor : tensors) sum += tensor.compared_elements;
  return sum;
}

std::int64_t LaneReport::bit_mismatch() const {
  std::int64_t sum = 0;
  for (const TensorReport& tensor : tensors) sum += tensor.bit_mismatch;
  return sum;
}

const TensorReport* LaneReport::worst() const {
  const auto worst = std::max_element(
      tensors.begin(), tensors.end(), [](const TensorReport& a, const TensorReport& b) {
        return std::pair(!a.passes, a.share_of_bound()) < std::pair(!b.passes, b.share_of_bound());
      });
  return worst == tensors.end() ? nullptr : &*worst;
}

double LaneReport::seconds() const {
  double most = 0.0;
  for (const RankReceipt& rank : ranks) most = std::max(most, rank.seconds);
  return most;
}

double LaneReport::exposed_seconds() const {
  double most = 0.0;
  for (const RankReceipt& rank : ranks) most = std::max(most, rank.exposed_seconds);
  return most;
}

std::int64_t ParityReport::count(LaneStatus status) const {
  return std::count_if(lanes.begin(), lanes.end(),
                       [&](const LaneReport& lane) { return lane.status == status; });
}

bool ParityReport::passes() const { return exit_code() == ExitCode::pass; }

ExitCode ParityReport::exit_code() const {
  // What was computed and is wrong outranks what was not computed.
  for (const FailureKind kind : {FailureKind::differs, FailureKind::internal,
                                 FailureKind::unavailable, FailureKind::bad_input}) {
    if (failure == kind) return exit_code_of(kind);
    for (const LaneReport& lane : lanes) {
      if (lane.status != LaneStatus::passed && lane.failure == kind) return exit_code_of(kind);
    }
  }
  if (count(LaneStatus::failed) > 0 || !reasons.empty()) return ExitCode::internal;
  if (count(LaneStatus::passed) == 0 || count(LaneStatus::not_evaluated) > 0) {
    return ExitCode::unavailable;
  }
  return ExitCode::pass;
}

std::string_view name_of_status(LaneStatus status) {
  switch (status) {
    case LaneStatus::passed:
      return "passed";
    case LaneStatus::failed:
      return "failed";
    case LaneStatus::not_evaluated:
      return "not evaluated";
  }
  return "?";
}

std::string lane_name(const LaneReport& lane) {
  return fmt::format("cp {} {} {} {} {} {}", lane.cp, name_of(lane.sharding), name_of(lane.mask),
                     name_of(lane.dtype), name_of(lane.schedule), lane.source);
}

std::string report_text(const ParityReport& report) {
  std::string text = tables_by_source(report);
  text += notes_text(report);
  text += reasons_text(report);
  for (const std::string& reason : report.reasons) text += fmt::format("failed: {}\n", reason);
  text += tensors_lines(report);
  text += reference_line(report) + "\n";
  text += fmt::format(
      "verdict: {}: {} passed, {} failed, {} not evaluated; guarantee: {}; chunk_tokens {}; isa "
      "{}\n",
      report.passes() ? "PASS" : "FAIL", report.count(LaneStatus::passed),
      report.count(LaneStatus::failed), report.count(LaneStatus::not_evaluated),
      distinct(report, &LaneReport::guarantee), report.chunk_tokens,
      distinct(report, &LaneReport::isa));
  return text;
}

}  // namespace cpattn
