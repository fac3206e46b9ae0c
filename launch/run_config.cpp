#include "launch/run_config.h"

namespace cpattn {

std::string_view why_without_effect(const RunConfig& config, std::string_view key) {
  const bool has_lengths = !config.cu_seqlens.empty();
  if (key == "layer" && config.tensors.empty())
    return "it picks from a file, and there is no tensors";
  if (!config.tensors.empty()) {
    bool is_synthetic = false;
    for_each_run_field(config, [&](const RunField& field, const auto&) {
      is_synthetic |= field.name == key && field.group == FieldGroup::synthetic;
    });
    return is_synthetic ? "the file that tensors names decides" : "";
  }
  if (has_lengths && (key == "seq_len" || key == "kv_len")) return "cu_seqlens decides the lengths";
  if (!has_lengths && key == "cu_seqlens_kv") return "it goes with cu_seqlens, which is not given";
  return "";
}

std::vector<LaneConfig> lanes_of(const RunConfig& config) {
  std::vector<LaneConfig> lanes;
  for (const DType dtype : config.dtype) {
    for (const MaskKind mask : config.mask) {
      for (const ShardingKind sharding : config.sharding) {
        for (const ScheduleKind schedule : config.schedule) {
          lanes.push_back({mask, sharding, schedule, dtype});
        }
      }
    }
  }
  return lanes;
}

CpConfig cp_config_of(const RunConfig& config, const LaneConfig& lane) {
  CpConfig result = config.cp_config;
  result.mask = lane.mask;
  result.sharding = lane.sharding;
  result.schedule = lane.schedule;
  return result;
}

}  // namespace cpattn
