#include "launch/parity_judge.h"

#include <fmt/core.h>

#include <algorithm>

#include "cp/plan.h"
#include "launch/compare.h"
#include "launch/error_bound.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

void fail(LaneReport& report, const std::string& reason) {
  report.status = LaneStatus::failed;
  report.failure = FailureKind::differs;
  report.reasons.push_back(reason);
}

bool is_compared(Direction direction, ResultRole role) {
  switch (direction) {
    case Direction::forward:
      return !is_gradient(role);
    case Direction::backward:
      return is_gradient(role);
    case Direction::both:
      return true;
  }
  return true;
}

/// Exact values of one tensor's reference rows, and what each of its groups may be off.
struct BoundedValues {
  const std::vector<double>* values = nullptr;
  std::vector<double> relative;
  std::vector<double> absolute;
  double floor = 0.0;
};

/// Bounds of out or lse.
BoundedValues bounded_forward(ResultRole role, const Reference& exact,
                              const Arithmetic& arithmetic) {
  BoundedValues bounded;
  const bool is_out = role == ResultRole::out;
  bounded.values = is_out ? &exact.out : &exact.lse;
  bounded.floor = is_out ? 0.0 : 1.0;
  for (const BoundedGroup& group : exact.groups) {
    bounded.relative.push_back(is_out ? out_bound(arithmetic, group)
                                      : lse_bound(arithmetic, group));
    bounded.absolute.push_back(is_out ? out_cancellation(arithmetic, group)
                                      : lse_cancellation(arithmetic, group));
  }
  return bounded;
}

BoundedValues bounded_gradient(ResultRole role, const Reference& exact, std::size_t num_chunks,
                               std::int64_t num_heads, const Arithmetic& arithmetic) {
  const reference::GradientRows& gradient = role == ResultRole::dq   ? exact.gradient.dq
                                            : role == ResultRole::dk ? exact.gradient.dk
                                                                     : exact.gradient.dv;
  BoundedValues bounded;
  bounded.values = &gradient.values;
  bounded.absolute = gradient_bounds(
      arithmetic, has_key_rows(role) ? SummedOver::rows : SummedOver::keys, gradient,
      exact.rows_of(role).chunk_of_row, num_chunks, static_cast<std::size_t>(num_heads));
  bounded.relative.assign(bounded.absolute.size(), kGradientBound);
  return bounded;
}

bool rounds_weights(std::string_view numerics) {
  constexpr std::string_view kWithRounding[] = {"bf16-dot", "cuda-mma", "cuda-wgmma"};
  return std::any_of(std::begin(kWithRounding), std::end(kWithRounding),
                     [&](std::string_view name) { return numerics.starts_with(name); });
}

}  // namespace

Judge::Judge(const RunConfig& config, const Inputs& inputs, int threads)
    : config_(config),
      inputs_(inputs),
      threads_(threads),
      lanes_(lane_specs(config, inputs.size())),
      baselines_(baseline_specs(config, inputs.size())),
      baseline_results_(baselines_.size()) {}

void Judge::set_baseline(std::size_t index, LaneResult result) {
  baseline_results_[index] = std::move(result);
}

LaneReport Judge::blank_report(std::size_t lane, std::int64_t cp) const {
  const LaneSpec& spec = lanes_[lane];
  LaneReport report;
  report.source = inputs_[static_cast<std::size_t>(spec.source)]->info().name;
  report.cp = static_cast<int>(cp);
  report.is_baseline = std::find(config_.cp.begin(), config_.cp.end(), cp) == config_.cp.end();
  report.sharding = spec.lane.sharding;
  report.mask = spec.lane.mask;
  report.dtype = spec.lane.dtype;
  report.schedule = spec.lane.schedule;
  report.direction = config_.direction;
  // Repeating a run on one rank repeats its bits whatever the schedule.
  report.bits_must_match = spec.lane.schedule == ScheduleKind::canonical || cp == 1;
  return report;
}

LaneReport Judge::judge(std::size_t lane, std::int64_t cp, const LaneResult& result) {
  const LaneSpec& spec = lanes_[lane];
  LaneReport report = blank_report(lane, cp);
  report.status = LaneStatus::passed;
  report.transport = result.transport;
  report.guarantee = result.guarantee;
  // A layout whose shard borders cut chunks promises less than its schedule does.
  report.bits_must_match = report.bits_must_match && (result.guarantee == kBitwise || cp == 1);
  // Another arithmetic is another rounding: then the error is judged, and the bits are counted.
  const auto& baseline = baseline_results_[baseline_index(baselines_, spec)];
  if (baseline && baseline->numerics != result.numerics) report.bits_must_match = false;
  report.isa = result.isa;
  report.threads = result.threads;
  report.ranks = result.ranks;
  for (const std::string& problem : result.problems) fail(report, problem);
  judge_delivery(result, row_maps(spec), report);
  judge_tensors(spec, result, report);
  return report;
}

void Judge::judge_delivery(const LaneResult& result, const RowMaps& maps,
                           LaneReport& report) const {
  if (static_cast<std::int64_t>(result.ranks.size()) != report.cp) {
    fail(report, fmt::format("{} of {} ranks delivered", result.ranks.size(), report.cp));
  }
  for (const bool of_keys : {false, true}) {
    if (of_keys && !has_gradients(config_)) continue;
    const RowMap& map = of_keys ? maps.kv : maps.q;
    const unsigned char* const deliveries = result.deliveries(of_keys);
    std::int64_t wrong = 0;
    std::int64_t first = -1;
    for (std::size_t row = 0; row < map.chunk_of_row.size(); ++row) {
      if (deliveries[row] == (map.chunk_of_row[row] >= 0 ? 1 : 0)) continue;
      if (wrong++ == 0) first = static_cast<std::int64_t>(row);
    }
    if (wrong == 0) continue;
    fail(report, fmt::format("{} {}row{} not delivered exactly once, first row {} ({} times)",
                             wrong, of_keys ? "key " : "", wrong == 1 ? " was" : "s were", first,
                             deliveries[first]));
  }
}

void Judge::judge_tensors(const LaneSpec& spec, const LaneResult& result, LaneReport& report) {
  const RowMaps& maps = row_maps(spec);
  if (!baseline_results_[baseline_index(baselines_, spec)]) {
    // What is wrong is the run that should have given it, and says so itself.
    report.reasons.push_back("there is no single-rank result to compare with");
    if (report.status == LaneStatus::passed) report.status = LaneStatus::not_evaluated;
    return;
  }
  for (const auto& [role, name] : EnumNames<ResultRole>::kValues) {
    // A tensor without rows has nothing to be compared.
    if (!is_compared(config_.direction, role) || maps.of(role).rows.empty()) continue;
    TensorReport& tensor_report = report.tensors.emplace_back();
    tensor_report.name = name;
    const ResultTensor* const tensor = result.find(role);
    if (tensor == nullptr) {
      tensor_report.passes = false;
      fail(report, fmt::format("{} was not delivered", name));
      continue;
    }
    const std::size_t reasons_before = report.reasons.size();
    const Tensor judged{spec, result, *tensor, tensor_report, report};
    judge_bits(judged, maps.of(role));
    judge_error(judged, maps.of(role));
    tensor_report.passes = report.reasons.size() == reasons_before;
  }
  if (report.compared_elements() == 0) fail(report, "no element was compared");
}

void Judge::judge_bits(const Tensor& tensor, const RowMap& map) const {
  const LaneResult& baseline = *baseline_results_[baseline_index(baselines_, tensor.spec)];
  const ResultTensor* const expected = baseline.find(tensor.tensor.role);
  if (expected == nullptr) {
    fail(tensor.lane, fmt::format("the single-rank run did not deliver {}", tensor.report.name));
    return;
  }
  const BitComparison bits = compare_bits(tensor.tensor.view(), expected->view(), map.rows);
  tensor.report.compared_elements = bits.compared;
  tensor.report.bit_mismatch = bits.mismatches;
  if (bits.compared == 0) fail(tensor.lane, tensor.report.name + ": no element was compared");
  if (bits.mismatches == 0) return;
  tensor.report.first_difference = to_string(*bits.first);
  const std::string text = fmt::format(
      "{}: {} of {} elements differ in bits from the single-rank run, first at {}",
      tensor.report.name, bits.mismatches, bits.compared, tensor.report.first_difference);
  if (tensor.lane.bits_must_match) {
    fail(tensor.lane, text);
  } else {
    tensor.lane.notes.push_back(text + "; this schedule and sharding promise none");
  }
}

Arithmetic Judge::arithmetic_of(const LaneSpec& spec, const LaneResult& result) const {
  const InputInfo& info = inputs_[static_cast<std::size_t>(spec.source)]->info();
  const bool is_arrival = spec.lane.schedule == ScheduleKind::arrival;
  const auto run = [&](std::int64_t longest) {
    return is_arrival ? longest : std::min(longest, config_.cp_config.chunk_tokens);
  };
  std::int64_t longest_q = 0;
  std::int64_t longest_kv = 0;
  for (const Document& document : info.batch.documents) {
    longest_q = std::max(longest_q, document.q_tokens);
    longest_kv = std::max(longest_kv, document.kv_tokens);
  }
  return {.head_dim = info.shape.head_dim,
          .value_dim = info.shape.value_dim,
          .run_keys = run(longest_kv),
          .run_rows = run(longest_q) * info.shape.group_size(),
          // The name of the arithmetic says whether weights go through a product of 16-bit numbers.
          .rounds_weights = rounds_weights(result.numerics),
          .weight_dtype = spec.lane.dtype == DType::f16 ? DType::f16 : DType::bf16,
          .out_dtype = problem_of(config_, spec.lane, info).out_dtype};
}

void Judge::judge_error(const Tensor& tensor, const RowMap& map) {
  const Reference& exact = reference(tensor.spec);
  const ResultRole role = tensor.tensor.role;
  const ReferenceRows& rows = exact.rows_of(role);
  tensor.report.reference_rows = static_cast<std::int64_t>(rows.rows.size());
  tensor.report.total_rows = static_cast<std::int64_t>(map.rows.size());
  const Arithmetic arithmetic = arithmetic_of(tensor.spec, tensor.result);
  const BoundedValues bounded =
      is_gradient(role)
          ? bounded_gradient(role, exact, map.chunks.size(), tensor.tensor.shape[1], arithmetic)
          : bounded_forward(role, exact, arithmetic);
  const DType dtype = tensor.tensor.dtype;
  const ErrorSummary error = compare_error(
      tensor.tensor.view(), {.rows = rows.rows,
                             .values = *bounded.values,
                             .chunk_of_row = rows.chunk_of_row,
                             .num_chunks = static_cast<std::int32_t>(map.chunks.size()),
                             .relative = bounded.relative,
                             .absolute = bounded.absolute,
                             .floor = bounded.floor,
                             .rounded_to = dtype,
                             .rounding_share = dtype == DType::f32 ? 0.0 : kOutputRoundingShare});
  tensor.report.rel_l2 = error.rel_l2;
  tensor.report.worst_rel_l2 = error.worst_rel_l2;
  tensor.report.bound = error.worst_allowed;
  tensor.report.max_abs = error.max_abs;
  tensor.report.worst_head = error.worst_head;
  tensor.report.worst_chunk = error.worst_chunk;
  if (error.passes()) return;
  for (const std::string& reason : reasons(error, tensor.report.name)) fail(tensor.lane, reason);
}

const RowMaps& Judge::row_maps(const LaneSpec& spec) {
  const std::string key = fmt::format("{} {}", spec.source, name_of(spec.lane.mask));
  const auto found = row_maps_.find(key);
  if (found != row_maps_.end()) return found->second;
  const InputInfo& info = inputs_[static_cast<std::size_t>(spec.source)]->info();
  return row_maps_.emplace(key, make_row_maps(info.batch, cp_config_of(config_, spec.lane)))
      .first->second;
}

const Reference& Judge::reference(const LaneSpec& spec) {
  const std::string key =
      fmt::format("{} {} {}", spec.source, name_of(spec.lane.mask), name_of(spec.lane.dtype));
  const auto found = references_.find(key);
  if (found != references_.end()) return found->second;
  const auto& baseline = baseline_results_[baseline_index(baselines_, spec)];
  return references_
      .emplace(key,
               make_reference({.config = config_,
                               .source = *inputs_[static_cast<std::size_t>(spec.source)],
                               .lane = spec.lane,
                               .maps = row_maps(spec),
                               .single_rank = baseline ? &*baseline : nullptr,
                               .num_references = static_cast<double>(
                                   inputs_.size() * config_.mask.size() * config_.dtype.size()),
                               .threads = threads_}))
      .first->second;
}

}  // namespace cpattn
