// RunConfig: everything one invocation of `cpattn` was asked for, resolved from YAML and the
// command line.
//
// One declaration per knob (for_each_run_field, for_each_cp_field) gives flag, YAML key, help, docs
// and digest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cp/config.h"
#include "cp/gpu_group.h"
#include "kernels/kernel_table.h"
#include "launch/inputs.h"
#include "src/base/dtype.h"

namespace cpattn {

/// Which results `parity` compares.
enum class Direction {
  forward,   ///< out and lse; no gradient is computed
  backward,  ///< dq, dk and dv
  both,
};

template <>
struct EnumNames<Direction> {
  static constexpr std::array kValues{NamedValue<Direction>{Direction::forward, "forward"},
                                      NamedValue<Direction>{Direction::backward, "backward"},
                                      NamedValue<Direction>{Direction::both, "both"}};
};

/// Where the lanes of `parity` run, and the single-rank run that they are compared with.
enum class LaneDevice {
  cpu,
  cuda,         ///< all of it on GPUs, one for each rank of a host as far as there are
  cpu_vs_cuda,  ///< lanes on GPUs, the single-rank run on the CPU
};

template <>
struct EnumNames<LaneDevice> {
  static constexpr std::array kValues{
      NamedValue<LaneDevice>{LaneDevice::cpu, "cpu"},
      NamedValue<LaneDevice>{LaneDevice::cuda, "cuda"},
      NamedValue<LaneDevice>{LaneDevice::cpu_vs_cuda, "cpu-vs-cuda"}};
};

/// What `bench` measures.
enum class BenchSuite {
  kernels,  ///< one rank: rate of the kernels against the peak of the machine and a peer
  ring,     ///< several ranks: time against one rank, exposed transfer, cost of the schedule
  gpu,      ///< each rank on a GPU: rates against its own peaks, cost of launches
};

template <>
struct EnumNames<BenchSuite> {
  static constexpr std::array kValues{NamedValue<BenchSuite>{BenchSuite::kernels, "kernels"},
                                      NamedValue<BenchSuite>{BenchSuite::ring, "ring"},
                                      NamedValue<BenchSuite>{BenchSuite::gpu, "gpu"}};
};

enum class BenchPass {
  forward,
  backward,  ///< of out and lse that are there already
  both,      ///< one after the other, timed together: a training step's share
};

template <>
struct EnumNames<BenchPass> {
  static constexpr std::array kValues{NamedValue<BenchPass>{BenchPass::forward, "forward"},
                                      NamedValue<BenchPass>{BenchPass::backward, "backward"},
                                      NamedValue<BenchPass>{BenchPass::both, "both"}};
};

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
  std::int64_t kv_len = -1;                 ///< -1: as seq_len (0 is a value: no keys)
  std::vector<std::int64_t> cu_seqlens;     ///< empty: one document of seq_len
  std::vector<std::int64_t> cu_seqlens_kv;  ///< empty: as cu_seqlens
  std::int64_t heads = 8;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 0;          ///< 0: as head_dim
  std::string softmax_scale = "auto";  ///< auto: 1 / sqrt(head_dim); otherwise a number
  // parity
  Direction direction = Direction::both;
  bool dlse = false;   ///< backward gets an incoming gradient of lse, too
  std::string inject;  ///< a fault name, see --list-faults
  std::int64_t reference_rows =
      0;  ///< rows compared with the double reference; 0: as many as fit the work budget
  std::string report;  ///< JSON path
  std::string junit;   ///< JUnit XML path
  LaneDevice device = LaneDevice::cpu;
  GpuExchange exchange = GpuExchange::automatic;
  std::string cuda_backend;  ///< shared object; empty: the installed one
  // plan, of GPUs
  std::string gpu_arch = "auto";     ///< auto, or "sm_90"
  std::int64_t multiprocessors = 0;  ///< 0: those of the GPU found, or the usual ones
  // bench; empty lists and 0: the suite's own choice
  BenchSuite suite = BenchSuite::kernels;
  std::vector<BenchPass> passes;
  std::vector<Isa> isas;
  std::vector<DType> dtypes;
  std::vector<MaskKind> masks;
  std::vector<std::int64_t> head_dims;
  std::vector<std::int64_t> seq_lens;
  std::vector<std::int64_t> thread_counts;
  std::int64_t repetitions = 0;
};

/// What a knob is about; a subcommand accepts the groups it can honour.
enum class FieldGroup : unsigned {
  lanes = 1,       ///< lists that are multiplied into lanes
  ring = 2,        ///< the rest of CpConfig
  kernels = 4,     ///< which arithmetic
  file = 8,        ///< inputs from a tensor file
  synthetic = 16,  ///< inputs made from a seed
  parity = 32,     ///< what parity compares and reports
  heads = 64,      ///< how many heads synthetic inputs have
  bench = 128,     ///< what bench sweeps
  gpu = 256,       ///< which GPUs' code, and what moves shards between them
  device = 512,    ///< where lanes run
  planned = 1024,  ///< which GPU a plan is for
};

/// What a text value may be.
enum class TextRule { any, isa_or_auto, dtype_or_same, number_or_auto, arch_or_auto };

/// One knob of RunConfig; `unset` says what its default means where that is not a value one can
/// write.
struct RunField : FieldInfo {
  FieldGroup group = FieldGroup::lanes;
  TextRule rule = TextRule::any;
  std::string_view unset{};
};

namespace detail {

/// The knobs of CpConfig as RunConfig holds them: mask, sharding and schedule become lists.
template <class Config, class Visitor>
void for_each_ring_field(Config& config, bool lanes, Visitor&& visit) {
  for_each_cp_field(config.cp_config, [&](const FieldInfo& info, auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    const RunField as_lane{info, FieldGroup::lanes};
    const RunField as_ring{info, FieldGroup::ring};
    if constexpr (std::is_same_v<Field, MaskKind>) {
      if (lanes) visit(as_lane, config.mask);
    } else if constexpr (std::is_same_v<Field, ShardingKind>) {
      if (lanes) visit(as_lane, config.sharding);
    } else if constexpr (std::is_same_v<Field, ScheduleKind>) {
      if (lanes) visit(as_lane, config.schedule);
    } else {
      if (!lanes) visit(as_ring, field);
    }
  });
}

template <class Config, class Visitor>
void for_each_synthetic_field(Config& config, Visitor&& visit) {
  constexpr FieldGroup group = FieldGroup::synthetic;
  constexpr double max_tokens = 1099511627776.0;  // 2^40
  visit(RunField{{"distribution", "what synthetic q, k, v look like"}, group}, config.distribution);
  visit(
      RunField{
          {"seed",
           "seed of synthetic inputs and gradients; an element depends on it, the tensor and the "
           "global index only",
           0, 9007199254740992.0},
          group},
      config.seed);
  visit(RunField{{"seq_len", "query tokens of one document", 0, max_tokens}, group},
        config.seq_len);
  visit(RunField{{"kv_len", "key tokens of one document", 0, max_tokens},
                 group,
                 TextRule::any,
                 "as seq_len"},
        config.kv_len);
  visit(
      RunField{{"cu_seqlens",
                "packed documents: cumulative query lengths from 0; equal neighbours are an empty "
                "document; replaces seq_len",
                0, max_tokens},
               group,
               TextRule::any,
               "one document of seq_len"},
      config.cu_seqlens);
  visit(RunField{{"cu_seqlens_kv", "cumulative key lengths, as many as cu_seqlens", 0, max_tokens},
                 group,
                 TextRule::any,
                 "as cu_seqlens"},
        config.cu_seqlens_kv);
  visit(RunField{{"heads", "query heads, a multiple of kv_heads", 1, 4096}, FieldGroup::heads},
        config.heads);
  visit(RunField{{"kv_heads", "key and value heads", 1, 4096}, FieldGroup::heads}, config.kv_heads);
  visit(RunField{{"head_dim", "channels of a query and key head", 1, kMaxHeadDim}, group},
        config.head_dim);
  visit(RunField{{"value_dim", "channels of a value head", 1, kMaxHeadDim},
                 group,
                 TextRule::any,
                 "as head_dim"},
        config.value_dim);
}

template <class Config, class Visitor>
void for_each_device_field(Config& config, Visitor&& visit) {
  visit(RunField{{"device",
                  "where lanes run: cpu, cuda, or cpu-vs-cuda (lanes on GPUs, compared with one "
                  "rank on the CPU)"},
                 FieldGroup::device},
        config.device);
  visit(RunField{{"exchange",
                  "what moves shards between GPUs; auto is nccl where every rank of a host has a "
                  "GPU of its own, else host: messages through host memory"},
                 FieldGroup::gpu},
        config.exchange);
  visit(RunField{{"cuda_backend", "shared object with the CUDA kernels", 0, 0, Scope::local},
                 FieldGroup::gpu,
                 TextRule::any,
                 "the installed one"},
        config.cuda_backend);
  visit(RunField{{"gpu_arch", "architecture; auto is that of the first GPU found, or sm_90", 0, 0,
                  Scope::local},
                 FieldGroup::planned,
                 TextRule::arch_or_auto},
        config.gpu_arch);
  visit(RunField{{"multiprocessors", "its multiprocessors, two thread blocks each", 1, 4096,
                  Scope::local},
                 FieldGroup::planned,
                 TextRule::any,
                 "those of the GPU found, or of a GPU of that architecture in data centers"},
        config.multiprocessors);
}

/// What bench sweeps; none of it changes a result.
template <class Config, class Visitor>
void for_each_bench_field(Config& config, Visitor&& visit) {
  const auto field = [](std::string_view name, std::string_view help, double min, double max,
                        std::string_view unset) {
    return RunField{{name, help, min, max, Scope::local}, FieldGroup::bench, TextRule::any, unset};
  };
  visit(field("suite", "what is measured", 0, 0, "kernels"), config.suite);
  visit(field("passes", "what is computed; both is a forward and its backward, timed together", 0,
              0, "kernels, gpu: forward,backward; ring: forward,backward,both"),
        config.passes);
  visit(field("isas", "instruction sets", 0, 0, "kernels: all this machine has; ring: the best"),
        config.isas);
  visit(field("dtypes", "element types", 0, 0, "kernels: f32,bf16; ring: f32; gpu: bf16"),
        config.dtypes);
  visit(field("masks", "masks", 0, 0, "kernels, gpu: full,causal; ring: causal"), config.masks);
  visit(field("head_dims", "head sizes", 1, kMaxHeadDim, "kernels, gpu: 64,128; ring: 128"),
        config.head_dims);
  visit(field("seq_lens", "tokens of the sequence", 1, 16777216,
              "kernels: 512,2048; ring: 8192; gpu: 1024,8192,16384"),
        config.seq_lens);
  visit(field("thread_counts", "threads of a rank", 1, 4096,
              "kernels: 1 and all cores; ring: the cores divided among the ranks"),
        config.thread_counts);
  visit(field("repetitions", "measurements of which the median is taken", 1, 1000,
              "kernels, gpu: 9; ring: 5"),
        config.repetitions);
}

}  // namespace detail

/// Calls visit(const RunField&, field&) for every knob, in documentation order. Config is RunConfig
/// or const RunConfig.
template <class Config, class Visitor>
void for_each_run_field(Config& config, Visitor&& visit) {
  visit(RunField{{"cp", "context-parallel sizes, one run each", 1, 4096, Scope::local},
                 FieldGroup::lanes},
        config.cp);
  detail::for_each_ring_field(config, true, visit);
  visit(RunField{{"dtype", "element type of q, k and v; inputs are rounded to it once"},
                 FieldGroup::lanes},
        config.dtype);
  detail::for_each_ring_field(config, false, visit);
  visit(RunField{{"isa", "instruction set of the kernels; auto takes the best this machine has", 0,
                  0, Scope::local},
                 FieldGroup::kernels,
                 TextRule::isa_or_auto},
        config.isa);
  visit(RunField{{"out_dtype", "element type of out; same is that of the inputs"},
                 FieldGroup::kernels,
                 TextRule::dtype_or_same},
        config.out_dtype);
  visit(RunField{{"softmax_scale", "factor of q.k, any finite number; auto is 1 / sqrt(head_dim)"},
                 FieldGroup::kernels,
                 TextRule::number_or_auto},
        config.softmax_scale);
  visit(RunField{{"tensors", "safetensors file with q, k, v and optional cu_seqlens, dout, dlse"},
                 FieldGroup::file,
                 TextRule::any,
                 "synthetic inputs"},
        config.tensors);
  visit(RunField{{"layer", "prefix of the tensors to take from the file"},
                 FieldGroup::file,
                 TextRule::any,
                 "all of them"},
        config.layer);
  detail::for_each_synthetic_field(config, visit);
  visit(RunField{{"direction",
                  "results that are compared: forward is out and lse, backward is dq, dk and dv "
                  "(the forward runs for it, uncompared)"},
                 FieldGroup::parity},
        config.direction);
  visit(RunField{{"dlse", "the backward gets an incoming gradient of lse as well as that of out"},
                 FieldGroup::parity},
        config.dlse);
  visit(RunField{{"reference_rows",
                  "query rows, and as many key rows, compared with the double-precision reference",
                  1, 1099511627776.0},
                 FieldGroup::parity,
                 TextRule::any,
                 "as many as fit the work budget"},
        config.reference_rows);
  visit(RunField{{"inject", "plants this fault; the verdict must turn red"},
                 FieldGroup::parity,
                 TextRule::any,
                 "none"},
        config.inject);
  visit(RunField{{"report", "writes the verdict and every lane as JSON to this file", 0, 0,
                  Scope::local},
                 FieldGroup::parity,
                 TextRule::any,
                 "none"},
        config.report);
  visit(RunField{{"junit", "writes the same as JUnit XML to this file", 0, 0, Scope::local},
                 FieldGroup::parity,
                 TextRule::any,
                 "none"},
        config.junit);
  detail::for_each_device_field(config, visit);
  detail::for_each_bench_field(config, visit);
}

/// Whether a knob has its default value.
template <class T>
bool is_default(const RunField& wanted, const T& value) {
  const RunConfig defaults;
  bool is_equal = false;
  for_each_run_field(defaults, [&](const RunField& field, const auto& default_value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(default_value)>, T>) {
      if (field.name == wanted.name) is_equal = value == default_value;
    }
  });
  return is_equal;
}

/// Why a knob changes nothing in this configuration; empty when it does. `key` is that of a
/// RunField.
std::string_view why_without_effect(const RunConfig& config, std::string_view key);

/// for_each_run_field without the knobs that change nothing or were left unset.
template <class Visitor>
void for_each_effective_field(const RunConfig& config, Visitor&& visit) {
  for_each_run_field(config, [&](const RunField& field, const auto& value) {
    if (!why_without_effect(config, field.name).empty()) return;
    if (!field.unset.empty() && is_default(field, value)) return;
    visit(field, value);
  });
}

/// Whether a run computes gradients.
inline bool has_gradients(const RunConfig& config) {
  return config.direction != Direction::forward;
}

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

/// Shape and documents that the knobs for synthetic inputs describe. InvalidArgument when lengths
/// do not fit together.
AttentionShape synthetic_shape(const RunConfig& config);
SequenceBatch synthetic_batch(const RunConfig& config);

/// The sources a run works on, in order.
std::vector<std::unique_ptr<InputSource>> open_inputs(const RunConfig& config);

/// The kernels `isa` names; Unsupported when this machine lacks them.
const KernelTable& kernels_of(const RunConfig& config);

/// The problem of a lane on one source (softmax_scale and out_dtype resolved).
struct Problem;
Problem problem_of(const RunConfig& config, const LaneConfig& lane, const InputInfo& input);

}  // namespace cpattn
