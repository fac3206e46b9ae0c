#include "launch/run_config.h"

#include <algorithm>
#include <charconv>

#include "cp/plan.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// The knobs below are text with one word that is not a value; the word was ruled out before.
template <NamedEnum E>
E named(const std::string& name, std::string_view knob) {
  const auto value = from_name<E>(name);
  require(value.has_value(), knob, ": expected ", choices<E>(), ", got '", name, "'");
  return *value;
}

double number(const std::string& text, std::string_view knob) {
  double value = 0.0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  require(result.ec == std::errc{} && result.ptr == text.data() + text.size(), knob,
          ": expected auto or a number, got '", text, "'");
  return value;
}

}  // namespace

std::string_view why_without_effect(const RunConfig& config, std::string_view key) {
  const bool has_lengths = !config.cu_seqlens.empty();
  if (key == "dlse" && config.direction == Direction::forward) {
    return "direction forward computes no gradients";
  }
  if (config.device == LaneDevice::cpu && config.suite != BenchSuite::gpu &&
      (key == "exchange" || key == "cuda_backend" || key == "gpu_arch" ||
       key == "multiprocessors")) {
    return "device cpu uses no GPU";
  }
  if (config.suite == BenchSuite::gpu && (key == "isas" || key == "thread_counts")) {
    return "suite gpu uses the kernels of the GPU";
  }
  if (config.device == LaneDevice::cuda && (key == "isa" || key == "threads")) {
    return "device cuda uses the kernels of the GPU";
  }
  if (config.device != LaneDevice::cpu && key == "inject") {
    return "faults are planted in runs with device cpu";
  }
  if (key == "layer" && config.tensors.empty())
    return "it picks from a file, and there is no tensors";
  if (!config.tensors.empty()) {
    bool is_synthetic = false;
    for_each_run_field(config, [&](const RunField& field, const auto&) {
      const bool is_of_synthetic =
          field.group == FieldGroup::synthetic || field.group == FieldGroup::heads;
      is_synthetic |= field.name == key && is_of_synthetic;
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

AttentionShape synthetic_shape(const RunConfig& config) {
  require(config.heads % config.kv_heads == 0, "heads is ", config.heads,
          ", expected a multiple of kv_heads = ", config.kv_heads);
  AttentionShape shape;
  shape.num_heads = config.heads;
  shape.num_kv_heads = config.kv_heads;
  shape.head_dim = config.head_dim;
  shape.value_dim = config.value_dim == 0 ? config.head_dim : config.value_dim;
  return shape;
}

SequenceBatch synthetic_batch(const RunConfig& config) {
  const auto& cu = config.cu_seqlens;
  if (cu.empty()) {
    return batch_of_one(config.seq_len, config.kv_len < 0 ? config.seq_len : config.kv_len);
  }
  const auto& cu_kv = config.cu_seqlens_kv.empty() ? cu : config.cu_seqlens_kv;
  // Of lengths that fall somewhere it is the fall that is refused, not what lies beyond the end.
  return batch_from_cu_seqlens(cu, cu_kv, *std::max_element(cu.begin(), cu.end()),
                               *std::max_element(cu_kv.begin(), cu_kv.end()));
}

std::vector<std::unique_ptr<InputSource>> open_inputs(const RunConfig& config) {
  if (!config.tensors.empty()) return open_tensor_file(config.tensors, config.layer);
  SyntheticSpec spec;
  spec.distribution = config.distribution;
  spec.seed = static_cast<std::uint64_t>(config.seed);
  spec.shape = synthetic_shape(config);
  spec.batch = synthetic_batch(config);
  std::vector<std::unique_ptr<InputSource>> inputs;
  inputs.push_back(make_synthetic(spec));
  return inputs;
}

const KernelTable& kernels_of(const RunConfig& config) {
  return config.isa == "auto" ? default_kernels() : find_kernels(named<Isa>(config.isa, "isa"));
}

Problem problem_of(const RunConfig& config, const LaneConfig& lane, const InputInfo& input) {
  Problem problem;
  problem.shape = input.shape;
  if (config.softmax_scale != "auto") {
    problem.shape.softmax_scale = number(config.softmax_scale, "softmax_scale");
  }
  problem.batch = input.batch;
  problem.dtype = lane.dtype;
  problem.out_dtype =
      config.out_dtype == "same" ? lane.dtype : named<DType>(config.out_dtype, "out_dtype");
  return problem;
}

}  // namespace cpattn
