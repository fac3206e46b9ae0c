// Runs one lane on this rank: loads its slice, runs the distributed forward and backward, gathers
// the results.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/faults.h"
#include "launch/inputs.h"
#include "launch/lane_result.h"
#include "launch/run_config.h"
#include "launch/shard_place.h"
#include "launch/world.h"

namespace cpattn {

/// One row of the table, without the CP size: a source and a combination of knobs.
struct LaneSpec {
  std::int64_t source = 0;  ///< index into the inputs
  LaneConfig lane;
};

using Inputs = std::vector<std::unique_ptr<InputSource>>;

/// Every source with every combination, in the order of the table.
std::vector<LaneSpec> lane_specs(const RunConfig& config, std::size_t num_sources);

/// The single-rank runs that lanes are compared with: one for each source, mask, schedule and
/// dtype. Sharding is no part of it, so that different shardings are compared with the same bits.
std::vector<LaneSpec> baseline_specs(const RunConfig& config, std::size_t num_sources);
std::size_t baseline_index(const std::vector<LaneSpec>& baselines, const LaneSpec& lane);

/// Whether the fault of `config` goes into this lane at this size.
std::optional<FaultKind> fault_of_lane(const RunConfig& config, const LaneSpec& spec,
                                       std::int64_t cp, const InputInfo& input);

struct LaneRun {
  const RunConfig& config;
  const InputSource& source;
  LaneConfig lane;
  std::optional<FaultKind> fault;
};

/// Collective. The result on rank 0, nothing elsewhere. `place` is made for `world`.
/// Errors  those of Plan, RingAttention and RingGradient.
std::optional<LaneResult> run_lane(const LaneRun& run, World& world, const ShardPlace& place);

}  // namespace cpattn
