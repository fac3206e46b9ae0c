#include "launch/bench_report.h"

#include <fmt/chrono.h>
#include <fmt/core.h>

#include <chrono>
#include <cstdlib>  // getloadavg
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/world.h"

namespace cpattn {
namespace {

using Json = nlohmann::ordered_json;

Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

std::string or_dash(const std::optional<double>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : "-";
}

/// "ok" or "BELOW" beside a target; for a cost, `value` and `target` change places.
std::string judged(const std::optional<double>& value, const std::optional<double>& target) {
  if (!value || !target) return "";
  return *value >= *target ? "ok" : "BELOW";
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string model, family, number;
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name"))
      model = value;
    else if (line.starts_with("cpu family"))
      family = value;
    else if (line.starts_with("model\t"))
      number = value;
  }
  if (model.empty()) return "unknown";
  return fmt::format("{} (family {}, model {})", model, family, number);
}

Json json_of(const BenchRun& run) {
  return {{"schema_version", "1"},
          {"suite", run.suite},
          {"command", run.command},
          {"date", run.date},
          {"cpu", run.cpu},
          {"cores", run.cores},
          {"load_before", run.load_before},
          {"load_after", run.load_after},
          {"gpu", run.gpu},
          {"peer", run.peer}};
}

void add_problem(Json& json, const BenchProblem& problem) {
  json["dtype"] = name_of(problem.dtype);
  json["head_dim"] = problem.head_dim;
  json["seq_len"] = problem.seq_len;
  json["mask"] = name_of(problem.mask);
  json["heads"] = problem.heads;
  json["kv_heads"] = problem.kv_heads;
  json["pass"] = name_of(problem.pass);
}

Json json_of(const KernelRecord& record) {
  Json json{{"name", record.name()}};
  add_problem(json, record.problem);
  json["threads"] = record.threads;
  json["gflops"] = record.gflops;
  json["peak_gflops"] = record.peak_gflops;
  json["fraction_of_peak"] = record.fraction_of_peak;
  json["ratio_to_peer"] = or_null(record.ratio_to_peer);
  json["isa"] = record.isa;
  json["numerics"] = record.numerics;
  json["schedule"] = name_of(record.schedule);
  json["repetitions"] = record.repetitions;
  json["spread"] = record.spread;
  json["cpu_share"] = record.cpu_share;
  json["peer_gflops"] = or_null(record.peer_gflops);
  json["thread_scaling"] = or_null(record.thread_scaling);
  json["target_fraction"] = or_null(record.target);
  json["target_ratio_to_peer"] = or_null(record.peer_target);
  return json;
}

Json json_of(const RingRecord& record) {
  const RingSamples& samples = record.samples;
  Json json{{"name", record.name()}};
  add_problem(json, samples.problem);
  json["threads"] = samples.threads;
  json["gflops"] = record.gflops();
  json["peak_gflops"] = nullptr;
  json["fraction_of_peak"] = nullptr;
  json["ratio_to_peer"] = nullptr;
  json["ranks"] = samples.ranks;
  json["isa"] = samples.isa;
  json["schedule"] = name_of(samples.schedule);
  json["transport"] = samples.transport;
  json["is_oversubscribed"] = samples.is_oversubscribed;
  json["repetitions"] = record.repetitions;
  json["spread"] = record.spread;
  json["seconds"] = record.seconds;
  json["tokens_per_second"] = record.tokens_per_second();
  json["ratio_to_baseline"] = or_null(record.ratio_to_baseline);
  json["target_ratio_to_baseline"] = or_null(record.ratio_target);
  json["cost_over_arrival"] = or_null(record.cost_over_arrival);
  json["target_cost_over_arrival"] = or_null(record.cost_target);
  json["exposed_seconds"] = record.exposed_seconds;
  json["transfer_seconds"] = or_null(record.transfer_seconds);
  json["hidden_share"] = or_null(record.hidden_share);
  json["bytes_sent"] = samples.bytes_sent;
  json["peak_rss_bytes"] = samples.peak_rss_bytes;
  json["planned_bytes_per_token"] = samples.planned_bytes_per_token;
  return json;
}

Json json_of(const GpuRecord& record) {
  constexpr double kGigaPerTera = 1e3;
  Json json{{"name", record.name()}};
  add_problem(json, record.problem);
  json["threads"] = nullptr;
  json["gflops"] = record.tflops * kGigaPerTera;
  json["peak_gflops"] = record.peak_tflops * kGigaPerTera;
  json["fraction_of_peak"] = record.fraction_of_peak;
  json["ratio_to_peer"] = nullptr;
  json["ranks"] = record.ranks;
  json["kernels"] = record.kernels;
  json["numerics"] = record.numerics;
  json["schedule"] = name_of(record.schedule);
  json["transport"] = record.transport;
  json["repetitions"] = record.repetitions;
  json["spread"] = record.spread;
  json["seconds"] = record.seconds;
  json["target_fraction"] = or_null(record.target);
  json["cost_over_arrival"] = or_null(record.cost_over_arrival);
  json["target_cost_over_arrival"] = or_null(record.cost_target);
  json["call_overhead_seconds"] = or_null(record.call_overhead_seconds);
  json["replay_overhead_seconds"] = or_null(record.replay_overhead_seconds);
  json["removed_overhead"] = or_null(record.removed_overhead);
  json["target_removed_overhead"] = or_null(record.removed_target);
  return json;
}

Json json_of(const GpuCopyRecord& record) {
  return {{"name", record.name},
          {"bytes_per_second", record.bytes_per_second},
          {"fraction_of_copy", record.fraction_of_copy},
          {"target_fraction", or_null(record.target)},
          {"repetitions", record.repetitions}};
}

template <class Record>
Json list_of(const std::vector<Record>& records) {
  Json list = Json::array();
  for (const Record& record : records) list.push_back(json_of(record));
  return list;
}

std::string text_of(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

template <class Record>
std::string document(const BenchRun& run, const std::vector<Record>& records) {
  Json json = json_of(run);
  json["records"] = list_of(records);
  return text_of(json);
}

}  // namespace

double load_average() {
  double load = 0.0;
  return ::getloadavg(&load, 1) == 1 ? load : 0.0;
}

BenchRun describe_run(std::string suite, std::string command) {
  BenchRun run;
  run.suite = std::move(suite);
  run.command = std::move(command);
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  run.date = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(now));
  run.cpu = cpu_name();
  run.cores = usable_cores();
  run.load_before = load_average();
  return run;
}

std::string run_text(const BenchRun& run) {
  std::string text = fmt::format("{}\n{}, cores: {}, {}, load {:.2f}\n", run.command, run.cpu,
                                 run.cores, run.date, run.load_before);
  if (!run.gpu.empty()) text += "on: " + run.gpu + "\n";
  if (!run.peer.empty()) text += "peer: " + run.peer + "\n";
  return text;
}

std::string kernel_header() {
  return "isa          pass     dtype    D     S mask   thr   GFLOP/s      peak  %peak  want       "
         " "
         "  x peer          scaling  spread  cpu\n";
}

std::string kernel_row(const KernelRecord& record) {
  const BenchProblem& problem = record.problem;
  return fmt::format(
      "{:<12} {:<8} {:<5} {:>4} {:>5} {:<6} {:>3} {:>9.1f} {:>9.1f} {:>6.1f} {:>5} {:<6} {:>6} "
      "{:<6} "
      "{:>9} {:>6.1f}% {:>4.2f}\n",
      record.isa, name_of(problem.pass), name_of(problem.dtype), problem.head_dim, problem.seq_len,
      name_of(problem.mask), record.threads, record.gflops, record.peak_gflops,
      100.0 * record.fraction_of_peak,
      record.target ? fmt::format("{:.0f}", 100.0 * *record.target) : "-",
      judged(record.fraction_of_peak, record.target), or_dash(record.ratio_to_peer, "{:.2f}"),
      judged(record.ratio_to_peer, record.peer_target), or_dash(record.thread_scaling, "{:.2f}"),
      100.0 * record.spread, record.cpu_share);
}

std::string gpu_header() {
  return "kernels              pass     dtype    D      S mask   schedule        ms  TFLOP/s     "
         "peak  %peak want         over arrival         launch us  replay us  removed\n";
}

std::string gpu_row(const GpuRecord& record) {
  constexpr double kMilli = 1e3, kMicro = 1e6;
  const BenchProblem& problem = record.problem;
  const auto micro = [](const std::optional<double>& seconds) {
    return seconds ? fmt::format("{:.1f}", *seconds * kMicro) : "-";
  };
  return fmt::format(
      "{:<20} {:<8} {:<5} {:>4} {:>6} {:<6} {:<9} {:>9.4f} {:>8.1f} {:>8.1f} {:>6.1f} {:>4} {:<6} "
      "{:>13} {:<6} {:>11} {:>10} {:>8} {}\n",
      record.kernels, name_of(problem.pass), name_of(problem.dtype), problem.head_dim,
      problem.seq_len, name_of(problem.mask), name_of(record.schedule), record.seconds * kMilli,
      record.tflops, record.peak_tflops, 100.0 * record.fraction_of_peak,
      record.target ? fmt::format("{:.0f}", 100.0 * *record.target) : "-",
      judged(record.fraction_of_peak, record.target),
      record.cost_over_arrival ? fmt::format("{:+.1f}%", 100.0 * *record.cost_over_arrival) : "-",
      judged(record.cost_target, record.cost_over_arrival), micro(record.call_overhead_seconds),
      micro(record.replay_overhead_seconds), or_dash(record.removed_overhead, "{:.2f}"),
      judged(record.removed_overhead, record.removed_target));
}

std::string copy_header() { return "moves        GB/s  of copy  want\n"; }

std::string copy_row(const GpuCopyRecord& record) {
  return fmt::format("{:<10} {:>6.0f} {:>8.2f} {:>5} {}\n", record.name,
                     record.bytes_per_second / 1e9, record.fraction_of_copy,
                     or_dash(record.target, "{:.2f}"),
                     judged(record.fraction_of_copy, record.target));
}

std::string ring_table(const std::vector<RingRecord>& records) {
  std::string text =
      "ranks thr pass     dtype    D      S mask   schedule   seconds   tok/s  GFLOP/s  x 1 rank   "
      "     "
      "over arrival         exposed  transfer  hidden  MB sent  MB peak\n";
  for (const RingRecord& record : records) {
    const RingSamples& samples = record.samples;
    const BenchProblem& problem = samples.problem;
    const std::string cost =
        record.cost_over_arrival ? fmt::format("{:+.1f}%", 100.0 * *record.cost_over_arrival) : "-";
    text += fmt::format(
        "{:>5} {:>3} {:<8} {:<5} {:>4} {:>6} {:<6} {:<9} {:>8.4f} {:>7.0f} {:>8.1f} {:>9} {:<6} "
        "{:>12} "
        "{:<6} {:>9.4f} {:>9} {:>7} {:>8.1f} {:>8.0f}\n",
        samples.ranks, samples.threads, name_of(problem.pass), name_of(problem.dtype),
        problem.head_dim, problem.seq_len, name_of(problem.mask), name_of(samples.schedule),
        record.seconds, record.tokens_per_second(), record.gflops(),
        or_dash(record.ratio_to_baseline, "{:.3f}"),
        judged(record.ratio_to_baseline, record.ratio_target), cost,
        judged(record.cost_target, record.cost_over_arrival), record.exposed_seconds,
        or_dash(record.transfer_seconds, "{:.4f}"), or_dash(record.hidden_share, "{:.3f}"),
        static_cast<double>(samples.bytes_sent) / 1e6,
        static_cast<double>(samples.peak_rss_bytes) / 1e6);
  }
  return text;
}

std::string bench_json(const BenchRun& run, const std::vector<KernelRecord>& records) {
  return document(run, records);
}

std::string bench_json(const BenchRun& run, const std::vector<RingRecord>& records) {
  return document(run, records);
}

std::string bench_json(const BenchRun& run, const std::vector<GpuRecord>& records,
                       const std::vector<GpuCopyRecord>& copies) {
  Json json = json_of(run);
  json["records"] = list_of(records);
  json["copies"] = list_of(copies);
  return text_of(json);
}

}  // namespace cpattn
