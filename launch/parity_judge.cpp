#include "launch/parity_judge.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>

#include "cp/plan.h"
#include "cp/sharding.h"
#include "kernels/reference/attention.h"
#include "launch/logit_magnitude.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

RowMap make_row_map(const SequenceBatch& batch, const CpConfig& config) {
  RowMap map;
  map.chunks = make_sharding(batch, config, 1).shards[0].q;
  map.chunk_of_row.assign(static_cast<std::size_t>(batch.q_rows), -1);
  map.visible_keys.assign(static_cast<std::size_t>(batch.q_rows), 0);
  for (std::size_t i = 0; i < map.chunks.size(); ++i) {
    const OwnedChunk& chunk = map.chunks[i];
    const Document& document = batch.documents[static_cast<std::size_t>(chunk.document)];
    for (std::int64_t token = 0; token < chunk.num_tokens; ++token) {
      const auto row = static_cast<std::size_t>(chunk.row_begin + token);
      map.chunk_of_row[row] = static_cast<std::int32_t>(i);
      map.visible_keys[row] = visible_pairs(document, config.mask, chunk.first + token, 1);
    }
  }
  for (std::size_t row = 0; row < map.chunk_of_row.size(); ++row) {
    if (map.chunk_of_row[row] >= 0) map.rows.push_back(static_cast<std::int64_t>(row));
  }
  return map;
}

/// A global tensor of one role, of which only some rows are filled (untouched pages cost nothing).
struct GlobalTensor {
  Buffer memory;
  AnyTensor view;
};

GlobalTensor read_rows(const InputSource& source, TensorRole role, DType dtype,
                       const std::array<std::int64_t, 3>& shape,
                       const std::vector<std::int64_t>& rows) {
  GlobalTensor tensor;
  tensor.memory = Buffer(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]) * size_of(dtype));
  tensor.view = contiguous_tensor(static_cast<void*>(tensor.memory.data()), dtype, shape);
  for (std::size_t i = 0; i < rows.size();) {
    std::size_t end = i + 1;  // neighbouring rows are read together
    while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
    AnyTensor part = tensor.view;
    part.shape[0] = static_cast<std::int64_t>(end - i);
    part.data = tensor.view.row(rows[i], 0);
    source.read(role, rows[i], part);
    i = end;
  }
  return tensor;
}

std::vector<std::int64_t> key_rows(const SequenceBatch& batch) {
  std::vector<std::int64_t> rows;
  for (const Document& document : batch.documents) {
    for (std::int64_t i = 0; i < document.kv_tokens; ++i) rows.push_back(document.kv_begin + i);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

void fail(LaneReport& report, const std::string& reason) {
  report.status = LaneStatus::failed;
  report.failure = FailureKind::differs;
  report.reasons.push_back(reason);
}

}  // namespace

std::vector<std::int64_t> choose_reference_rows(const std::vector<OwnedChunk>& chunks,
                                                double flop_of_all, double flop_budget,
                                                std::int64_t asked) {
  std::vector<std::int64_t> all;
  std::vector<std::int64_t> edges;
  for (const OwnedChunk& chunk : chunks) {
    if (chunk.num_tokens == 0) continue;
    edges.push_back(chunk.row_begin);
    edges.push_back(chunk.row_begin + chunk.num_tokens - 1);
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) all.push_back(chunk.row_begin + i);
  }
  std::sort(all.begin(), all.end());
  std::sort(edges.begin(), edges.end());
  const auto total = static_cast<std::int64_t>(all.size());
  std::int64_t count = total;
  if (asked > 0) {
    count = std::min(asked, total);
  } else if (flop_of_all > flop_budget) {
    count = static_cast<std::int64_t>(static_cast<double>(total) * (flop_budget / flop_of_all));
    count = std::clamp<std::int64_t>(count, std::min<std::int64_t>(total, 2), total);
  }
  if (count == total) return all;

  std::set<std::int64_t> chosen;
  const auto spread = [&](const std::vector<std::int64_t>& from, std::int64_t number) {
    const auto size = static_cast<std::int64_t>(from.size());
    for (std::int64_t i = 0; i < std::min(number, size); ++i) {
      const std::int64_t last = std::max<std::int64_t>(1, std::min(number, size) - 1);
      chosen.insert(from[static_cast<std::size_t>(i * (size - 1) / last)]);
    }
  };
  spread(edges, count / 2);
  std::vector<std::int64_t> rest;
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(),
                      std::back_inserter(rest));
  spread(rest, count - static_cast<std::int64_t>(chosen.size()));
  return {chosen.begin(), chosen.end()};
}

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
  // Repeating a run on one rank repeats its bits whatever the schedule.
  report.bits_must_match = spec.lane.schedule == ScheduleKind::canonical || cp == 1;
  return report;
}

LaneReport Judge::judge(std::size_t lane, std::int64_t cp, const LaneResult& result) {
  const LaneSpec& spec = lanes_[lane];
  const RowMap& map = row_map(spec);
  LaneReport report = blank_report(lane, cp);
  report.status = LaneStatus::passed;
  report.transport = result.transport;
  report.guarantee = result.guarantee;
  // A layout whose shard borders cut chunks promises less than its schedule does.
  report.bits_must_match = report.bits_must_match && (result.guarantee == kBitwise || cp == 1);
  report.isa = result.isa;
  report.threads = result.threads;
  report.ranks = result.ranks;
  for (const std::string& problem : result.problems) fail(report, problem);
  judge_delivery(result, map, report);
  judge_bits(spec, result, map, report);
  judge_error(spec, result, report);
  return report;
}

void Judge::judge_delivery(const LaneResult& result, const RowMap& map, LaneReport& report) const {
  if (static_cast<std::int64_t>(result.ranks.size()) != report.cp) {
    fail(report, fmt::format("{} of {} ranks delivered", result.ranks.size(), report.cp));
  }
  std::int64_t wrong = 0;
  std::int64_t first = -1;
  for (std::int64_t row = 0; row < result.rows; ++row) {
    const auto place = static_cast<std::size_t>(row);
    const int expected = map.chunk_of_row[place] >= 0 ? 1 : 0;
    if (result.deliveries.as<unsigned char>()[place] == expected) continue;
    if (wrong++ == 0) first = row;
  }
  if (wrong == 0) return;
  fail(report, fmt::format("{} row{} not delivered exactly once, first row {} ({} times)", wrong,
                           wrong == 1 ? " was" : "s were", first,
                           result.deliveries.as<unsigned char>()[static_cast<std::size_t>(first)]));
}

void Judge::judge_bits(const LaneSpec& spec, const LaneResult& result, const RowMap& map,
                       LaneReport& report) const {
  const std::size_t index = baseline_index(baselines_, spec);
  if (!baseline_results_[index]) {
    fail(report, "there is no single-rank result to compare with");
    return;
  }
  const LaneResult& baseline = *baseline_results_[index];
  BitComparison bits = compare_bits(result.out_view(), baseline.out_view(), map.rows);
  const std::string tensor = bits.mismatches > 0 ? "out" : "lse";
  accumulate(bits, compare_bits(result.lse_view(), baseline.lse_view(), map.rows));
  report.compared_elements = bits.compared;
  report.bit_mismatch = bits.mismatches;
  if (bits.first) report.first_difference = tensor + " " + to_string(*bits.first);
  if (bits.compared == 0) fail(report, "no element was compared");
  if (bits.mismatches == 0) return;
  const std::string text =
      fmt::format("{} of {} elements differ in bits from the single-rank run, first {}",
                  bits.mismatches, bits.compared, report.first_difference);
  if (report.bits_must_match) {
    fail(report, text);
  } else {
    report.notes.push_back(text + "; the arrival schedule promises no bits");
  }
}

Arithmetic Judge::arithmetic_of(const LaneSpec& spec, const LaneResult& result) const {
  const InputInfo& info = inputs_[static_cast<std::size_t>(spec.source)]->info();
  std::int64_t longest = 0;
  for (const Document& document : info.batch.documents) {
    longest = std::max(longest, document.kv_tokens);
  }
  Arithmetic arithmetic;
  arithmetic.head_dim = info.shape.head_dim;
  arithmetic.run_keys = spec.lane.schedule == ScheduleKind::arrival
                            ? longest
                            : std::min(longest, config_.cp_config.chunk_tokens);
  // The name of the arithmetic says whether weights go through a bf16 dot product.
  arithmetic.rounds_weights = result.numerics.starts_with("bf16-dot");
  return arithmetic;
}

void Judge::judge_error(const LaneSpec& spec, const LaneResult& result, LaneReport& report) {
  const Reference& exact = reference(spec);
  const RowMap& map = row_map(spec);
  report.reference_rows = static_cast<std::int64_t>(exact.rows.size());
  report.total_rows = static_cast<std::int64_t>(map.rows.size());
  const Arithmetic arithmetic = arithmetic_of(spec, result);
  std::vector<double> out_bounds;
  std::vector<double> lse_bounds;
  for (const BoundedGroup& group : exact.groups) {
    out_bounds.push_back(out_bound(arithmetic, group));
    lse_bounds.push_back(lse_bound(arithmetic, group));
  }

  Expectation expectation{.rows = exact.rows,
                          .values = exact.out,
                          .chunk_of_row = exact.chunk_of_row,
                          .num_chunks = static_cast<std::int32_t>(map.chunks.size()),
                          .relative = out_bounds,
                          .rounded_to = result.out_dtype};
  if (result.out_dtype != DType::f32) expectation.rounding_share = kOutputRoundingShare;
  const ErrorSummary out = compare_error(result.out_view(), expectation);
  expectation.values = exact.lse;
  expectation.relative = lse_bounds;
  expectation.floor = 1.0;
  expectation.rounded_to = DType::f32;
  expectation.rounding_share = 0.0;
  const ErrorSummary lse = compare_error(result.lse_view(), expectation);

  report.rel_l2 = out.rel_l2;
  report.worst_rel_l2 = out.worst_rel_l2;
  report.rel_l2_bound = out.worst_allowed;
  report.max_abs = out.max_abs;
  report.worst_head = out.worst_head;
  report.worst_chunk = out.worst_chunk;
  report.rel_l2_lse = lse.rel_l2;
  report.worst_rel_l2_lse = lse.worst_rel_l2;
  report.rel_l2_lse_bound = lse.worst_allowed;
  if (!out.passes()) {
    for (const std::string& reason : reasons(out, "out")) fail(report, reason);
  }
  if (!lse.passes()) {
    for (const std::string& reason : reasons(lse, "lse")) fail(report, reason);
  }
}

const RowMap& Judge::row_map(const LaneSpec& spec) {
  const std::string key = fmt::format("{} {}", spec.source, name_of(spec.lane.mask));
  const auto found = row_maps_.find(key);
  if (found != row_maps_.end()) return found->second;
  const InputInfo& info = inputs_[static_cast<std::size_t>(spec.source)]->info();
  return row_maps_.emplace(key, make_row_map(info.batch, cp_config_of(config_, spec.lane)))
      .first->second;
}

const Reference& Judge::reference(const LaneSpec& spec) {
  const std::string key =
      fmt::format("{} {} {}", spec.source, name_of(spec.lane.mask), name_of(spec.lane.dtype));
  const auto found = references_.find(key);
  if (found != references_.end()) return found->second;
  return references_.emplace(key, make_reference(spec)).first->second;
}

Reference Judge::make_reference(const LaneSpec& spec) {
  const InputSource& source = *inputs_[static_cast<std::size_t>(spec.source)];
  const RowMap& map = row_map(spec);
  const Problem problem = problem_of(config_, spec.lane, source.info());
  const AttentionShape& shape = problem.shape;
  double pairs = 0.0;
  for (const std::int64_t keys : map.visible_keys) pairs += static_cast<double>(keys);
  const double flop = 2.0 * pairs * static_cast<double>(shape.num_heads) *
                      static_cast<double>(shape.head_dim + shape.value_dim);
  const double num_references =
      static_cast<double>(inputs_.size() * config_.mask.size() * config_.dtype.size());

  Reference exact;
  exact.rows = choose_reference_rows(map.chunks, flop, kReferenceFlopBudget / num_references,
                                     config_.reference_rows);
  for (const std::int64_t row : exact.rows) {
    exact.chunk_of_row.push_back(map.chunk_of_row[static_cast<std::size_t>(row)]);
  }
  exact.groups.assign(map.chunks.size() * static_cast<std::size_t>(shape.num_heads), {.rows = 0});
  if (exact.rows.empty()) return exact;  // to the reference an empty list means all rows
  const SequenceBatch& batch = problem.batch;
  const std::vector<std::int64_t> keys = key_rows(batch);
  const GlobalTensor q = read_rows(source, TensorRole::q, problem.dtype,
                                   {batch.q_rows, shape.num_heads, shape.head_dim}, exact.rows);
  const GlobalTensor k = read_rows(source, TensorRole::k, problem.dtype,
                                   {batch.kv_rows, shape.num_kv_heads, shape.head_dim}, keys);
  const GlobalTensor v = read_rows(source, TensorRole::v, problem.dtype,
                                   {batch.kv_rows, shape.num_kv_heads, shape.value_dim}, keys);
  const reference::AttentionArgs args{.shape = shape,
                                      .batch = batch,
                                      .mask = spec.lane.mask,
                                      .q = q.view,
                                      .k = k.view,
                                      .v = v.view,
                                      .rows = exact.rows,
                                      .num_threads = threads_};
  reference::AttentionResult result = reference::attention(args);
  exact.out = std::move(result.out);
  exact.lse = std::move(result.lse);
  std::vector<std::int64_t> visible;
  for (const std::int64_t row : exact.rows) {
    visible.push_back(map.visible_keys[static_cast<std::size_t>(row)]);
  }
  const std::vector<double> magnitudes = logit_magnitudes(
      args, exact.lse, exact.chunk_of_row, visible, static_cast<std::int32_t>(map.chunks.size()));
  for (std::size_t i = 0; i < exact.groups.size(); ++i) {
    const auto chunk = static_cast<std::int32_t>(i / static_cast<std::size_t>(shape.num_heads));
    exact.groups[i] = {std::count(exact.chunk_of_row.begin(), exact.chunk_of_row.end(), chunk),
                       magnitudes[i]};
  }
  return exact;
}

}  // namespace cpattn
