// ParityReport: what a parity run found, lane by lane, and the verdict that follows from it.
//
// The verdict comes only from what ran: a lane that delivered nothing is "not evaluated", and a run
// with such a lane, or with no lane at all, does not pass.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/cli.h"
#include "launch/run_config.h"

namespace cpattn {

/// What one rank says about one lane, gathered by rank 0.
struct RankReceipt {
  int rank = 0;
  std::string host;
  std::int64_t pid = 0;
  std::int64_t rows = 0;  ///< query rows it computed
  std::int64_t bytes_sent = 0;
  std::int64_t messages = 0;
  double seconds = 0.0;           ///< forward and backward
  double backward_seconds = 0.0;  ///< the backward of it
  double exposed_seconds = 0.0;   ///< of both, waiting for a peer
  std::int64_t peak_rss_bytes = 0;
  std::int64_t fault_sites = 0;  ///< places in which the planted fault changed something

  double compute_seconds() const { return seconds - exposed_seconds; }
};

enum class LaneStatus { passed, failed, not_evaluated };

/// Why a lane failed decides the exit code: what it computed differs, or it did not get there.
enum class FailureKind { none, differs, bad_input, unavailable, internal };

/// What comparing one tensor of a lane found.
struct TensorReport {
  std::string name;    ///< "out", "lse", "dq", "dk", "dv"
  bool passes = true;  ///< all of: complete, equal bits where they must be, error within its bound

  // against the single-rank run
  std::int64_t compared_elements = 0;
  std::int64_t bit_mismatch = 0;
  std::string first_difference;  ///< place, both values, both bit patterns

  // against the double-precision reference
  std::int64_t reference_rows = 0;
  std::int64_t total_rows = 0;
  double rel_l2 = 0.0;
  double worst_rel_l2 = 0.0;  ///< of (worst_head, worst_chunk): the group nearest to its bound
  double bound = 0.0;         ///< what that group may differ
  double max_abs = 0.0;
  std::int64_t worst_head = 0;
  std::int64_t worst_chunk = 0;

  /// How much of its bound the worst group uses; fails above 1.
  double share_of_bound() const;
};

struct LaneReport {
  // which lane
  std::string source;
  int cp = 1;
  bool is_baseline = false;  ///< the single-rank run the others are compared with
  ShardingKind sharding = ShardingKind::zigzag;
  MaskKind mask = MaskKind::causal;
  DType dtype = DType::f32;
  ScheduleKind schedule = ScheduleKind::canonical;
  Direction direction = Direction::both;

  // verdict
  LaneStatus status = LaneStatus::not_evaluated;
  FailureKind failure = FailureKind::none;
  std::vector<std::string> reasons;  ///< why it did not pass; empty when it did
  std::vector<std::string> notes;    ///< what is worth knowing and changes nothing

  std::vector<TensorReport> tensors;  ///< those that were compared
  bool bits_must_match = true;        ///< false for the arrival schedule

  // how it ran
  std::string transport;
  std::string guarantee;
  std::string isa;
  std::int64_t threads = 0;
  std::vector<RankReceipt> ranks;

  std::int64_t compared_elements() const;  ///< of all tensors
  std::int64_t bit_mismatch() const;
  /// The tensor that uses most of its bound, among those that fail if any do; nullptr when none was
  /// compared.
  const TensorReport* worst() const;
  double seconds() const;          ///< of the slowest rank
  double exposed_seconds() const;  ///< of the rank that waited most
};

struct ParityReport {
  std::vector<LaneReport> lanes;
  std::vector<std::pair<std::string, std::string>> environment;  ///< version, compiler, isa, ...
  std::vector<std::pair<std::string, std::string>> config;       ///< every knob as text
  std::int64_t chunk_tokens = 0;
  std::string inject;                       ///< the planted fault, or empty
  std::vector<std::string> reasons;         ///< why the run as a whole does not pass
  FailureKind failure = FailureKind::none;  ///< what those reasons amount to

  std::int64_t count(LaneStatus status) const;
  bool passes() const;
  ExitCode exit_code() const;
};

std::string_view name_of_status(LaneStatus status);

/// "cp 2 zigzag causal bf16 canonical sample.safetensors:layer.0"
std::string lane_name(const LaneReport& lane);

/// The table, the reasons of what did not pass, and the verdict line; for people.
std::string report_text(const ParityReport& report);

/// The same for programs. Non-finite numbers are the strings "inf", "-inf" and "nan".
std::string report_json(const ParityReport& report);

/// The same as JUnit XML: one testcase per lane; not evaluated is an error, not a skip.
std::string report_junit(const ParityReport& report);

}  // namespace cpattn
