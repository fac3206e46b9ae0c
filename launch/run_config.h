// RunConfig: everything one invocation of `cpattn` was asked for, resolved from YAML and the
// command line.
//
// One declaration per knob (for_each_run_field, for_each_cp_field) gives flag, YAML key, help, docs
// and digest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cp/config.h"
#include "kernels/kernel_table.h"
#include "launch/inputs.h"
#include "src/base/dtype.h"

namespace cpattn {

/// Knobs that take a list make one lane per combination.
struct RunConfig {
  // lanes
  std::vector<std::int64_t> cp{1, 2, 4};
  std::vector<MaskKind> mask{MaskKind::causal};
  std::vector<ShardingKind> sharding{ShardingKind::zigzag};
  std::vector<ScheduleKind> schedule{ScheduleKind::canonical};
  std::vector<DType> dtype{DType::f32};
  // what CpConfig holds besides mask, sharding and schedule, which come from the lane
  CpConfig cp_config;
  std::string isa = "auto";       ///< auto, or a name of Isa
  std::string out_dtype = "f32";  ///< f32, f16, bf16, or "same" (as dtype)
  // inputs: a tensor file, or synthetic
  std::string tensors;
  std::string layer;
  Distribution distribution = Distribution::normal;
  std::int64_t seed = 1;
  std::int64_t seq_len = 2048;
  std::int64_t kv_len = 0;                  ///< 0: as seq_len
  std::vector<std::int64_t> cu_seqlens;     ///< empty: one document of seq_len
  std::vector<std::int64_t> cu_seqlens_kv;  ///< empty: as cu_seqlens
  std::int64_t heads = 8;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 0;          ///< 0: as head_dim
  std::string softmax_scale = "auto";  ///< auto: 1 / sqrt(head_dim); otherwise a number
  // parity
  std::string inject;  ///< a fault name, see --list-faults
  std::int64_t reference_rows =
      0;  ///< rows compared with the double reference; 0: as many as fit the work budget
  std::string report;  ///< JSON path
  std::string junit;   ///< JUnit XML path
};

/// One combination of the lists above, without the CP size.
struct LaneConfig {
  MaskKind mask;
  ShardingKind sharding;
  ScheduleKind schedule;
  DType dtype;
};
std::vector<LaneConfig> lanes_of(const RunConfig& config);

/// The CpConfig of a lane.
CpConfig cp_config_of(const RunConfig& config, const LaneConfig& lane);

/// The sources a run works on, in order.
std::vector<std::unique_ptr<InputSource>> open_inputs(const RunConfig& config);

/// The kernels `isa` names; Unsupported when this machine lacks them.
const KernelTable& kernels_of(const RunConfig& config);

/// The problem of a lane on one source (softmax_scale and out_dtype resolved).
struct Problem;
Problem problem_of(const RunConfig& config, const LaneConfig& lane, const InputInfo& input);

}  // namespace cpattn
