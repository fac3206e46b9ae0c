// Judges lane results: against the single-rank run, bit for bit, and against double precision.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "launch/compare.h"
#include "launch/error_bound.h"
#include "launch/job_files.h"
#include "launch/parity_lane.h"
#include "launch/report.h"
#include "launch/run_config.h"

namespace cpattn {

/// Rows of double-precision attention that are worth computing for all lanes of a run together.
inline constexpr double kReferenceFlopBudget = 4e10;

/// Which rows of a problem the reference computes: all of them when they cost no more than
/// `flop_budget` (or when `asked` covers them), otherwise a fixed spread: half of them first and
/// last rows of chunks, half at even distances. Ascending, without repetition. Pure.
std::vector<std::int64_t> choose_reference_rows(const std::vector<OwnedChunk>& chunks,
                                                double flop_of_all, double flop_budget,
                                                std::int64_t asked);

/// What does not depend on how a lane was split: which rows and chunks there are.
struct RowMap {
  std::vector<OwnedChunk> chunks;          ///< of all documents
  std::vector<std::int64_t> rows;          ///< global rows that belong to a document, ascending
  std::vector<std::int64_t> visible_keys;  ///< of each global row
  std::vector<std::int32_t> chunk_of_row;  ///< of each global row; -1: padding
};

/// Exact values of some rows and what a result may differ from them by.
struct Reference {
  std::vector<std::int64_t> rows;
  std::vector<std::int32_t> chunk_of_row;  ///< of each of `rows`
  std::vector<double> out;                 ///< [rows, heads, value_dim]
  std::vector<double> lse;                 ///< [rows, heads]
  std::vector<BoundedGroup> groups;        ///< [chunks, heads]
};

class Judge {
 public:
  /// `config` and `inputs` must outlive it.
  Judge(const RunConfig& config, const Inputs& inputs, int threads);

  const std::vector<LaneSpec>& lanes() const { return lanes_; }
  const std::vector<LaneSpec>& baselines() const { return baselines_; }
  void set_baseline(std::size_t index, LaneResult result);

  /// A report with everything but a result: what a lane that did not run is.
  LaneReport blank_report(std::size_t lane, std::int64_t cp) const;

  /// Compares a result. The first call for an input, mask and dtype computes its reference.
  LaneReport judge(std::size_t lane, std::int64_t cp, const LaneResult& result);

 private:
  const RowMap& row_map(const LaneSpec& spec);
  const Reference& reference(const LaneSpec& spec);
  Reference make_reference(const LaneSpec& spec);
  void judge_delivery(const LaneResult& result, const RowMap& map, LaneReport& report) const;
  void judge_bits(const LaneSpec& spec, const LaneResult& result, const RowMap& map,
                  LaneReport& report) const;
  Arithmetic arithmetic_of(const LaneSpec& spec, const LaneResult& result) const;
  void judge_error(const LaneSpec& spec, const LaneResult& result, LaneReport& report);

  const RunConfig& config_;
  const Inputs& inputs_;
  int threads_;
  std::vector<LaneSpec> lanes_;
  std::vector<LaneSpec> baselines_;
  std::vector<std::optional<LaneResult>> baseline_results_;
  std::map<std::string, RowMap> row_maps_;
  std::map<std::string, Reference> references_;
};

}  // namespace cpattn
