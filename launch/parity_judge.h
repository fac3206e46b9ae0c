// Judges lane results: against the single-rank run, bit for bit, and against double precision.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/compare.h"
#include "launch/lane_result.h"
#include "launch/parity_lane.h"
#include "launch/parity_reference.h"
#include "launch/report.h"
#include "launch/run_config.h"

namespace cpattn {

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
  /// One tensor of a lane that is being judged, and where what is found goes.
  struct Tensor {
    const LaneSpec& spec;
    const LaneResult& result;
    const ResultTensor& tensor;
    TensorReport& report;
    LaneReport& lane;
  };

  const RowMaps& row_maps(const LaneSpec& spec);
  const Reference& reference(const LaneSpec& spec);
  Arithmetic arithmetic_of(const LaneSpec& spec, const LaneResult& result) const;
  void judge_delivery(const LaneResult& result, const RowMaps& maps, LaneReport& report) const;
  void judge_tensors(const LaneSpec& spec, const LaneResult& result, LaneReport& report);
  void judge_bits(const Tensor& tensor, const RowMap& map) const;
  void judge_error(const Tensor& tensor, const RowMap& map);

  const RunConfig& config_;
  const Inputs& inputs_;
  int threads_;
  std::vector<LaneSpec> lanes_;
  std::vector<LaneSpec> baselines_;
  std::vector<std::optional<LaneResult>> baseline_results_;
  std::map<std::string, RowMaps> row_maps_;
  std::map<std::string, Reference> references_;
};

}  // namespace cpattn
