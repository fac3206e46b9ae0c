#include "launch/bench_gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <memory>

#include "launch/bench_gpu_timer.h"
#include "launch/bench_timing.h"
#include "launch/shard_place.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr std::int64_t kDefaultRepetitions = 9;
constexpr std::int64_t kChunkTokens = 4096;
constexpr std::array kSchedules{ScheduleKind::canonical, ScheduleKind::arrival};

/// Where launches weigh: up to this many tokens, their cost is measured.
constexpr std::int64_t kShortTokens = 1024;
/// Copies move so many times the keys of the longest problem: by default 256 MiB, five times the
/// cache of an H200.
constexpr std::int64_t kKeysOfACopy = 8;
/// Passes in a graph that are enough to make its one launch count for nothing.
constexpr int kPassesOfALongGraph = 16;

CpConfig config_of(const BenchProblem& problem, ScheduleKind schedule) {
  CpConfig config;
  config.mask = problem.mask;
  config.sharding = ShardingKind::zigzag;
  config.schedule = schedule;
  config.chunk_tokens = kChunkTokens;
  return config;
}

/// One problem under both schedules, which take turns.
class GpuCase {
 public:
  GpuCase(const BenchProblem& problem, const GpuSuite& suite, const ShardPlace& place, World& world,
          const GpuTimer& timer, const GpuPeak& peak)
      : problem_(problem), place_(place), world_(world), timer_(timer), peak_(peak) {
    ShardTransport& transport = place.transport(world.comm);
    for (const ScheduleKind schedule : kSchedules) {
      Lane& lane = lanes_.emplace_back();
      lane.attention = std::make_unique<BenchAttention>(problem, config_of(problem, schedule),
                                                        place.kernels(), transport, place.stream());
    }
    const Shard& shard = lanes_.front().attention->plan().shard();
    tensors_ = std::make_unique<BenchTensors>(problem, shard.q_rows, shard.kv_rows,
                                              world.comm.rank(), &transport.device());
    for (Lane& lane : lanes_) {
      lane.attention->forward(*tensors_);  // makes what a backward reads
      run(lane);
      lane.calls = calls_that_fill(suite.run_seconds, seconds_of(lane, 1));
    }
  }

  void measure(bool is_swapped) {
    std::array<double, kSchedules.size()> seconds{};
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const std::size_t which = is_swapped ? lanes_.size() - 1 - i : i;
      seconds[which] = measure(lanes_[which]);
    }
    costs_.push_back(seconds[0] / seconds[1] - 1.0);
  }

  std::vector<GpuRecord> records() const {
    std::vector<GpuRecord> records;
    for (std::size_t i = 0; i < lanes_.size(); ++i) records.push_back(record_of(i));
    return records;
  }

  /// What launches cost, of the schedule that keeps its bits.
  void measure_launches() {
    Lane& lane = lanes_.front();
    if (problem_.seq_len > kShortTokens || !place_.transport(world_.comm).can_capture()) return;
    if (!short_graph_) {
      short_graph_ = place_.capture([&] { run(lane); });
      long_graph_ = place_.capture([&] {
        for (int i = 0; i < kPassesOfALongGraph; ++i) run(lane);
      });
    }
    const auto replayed = [&](OwnedGraph& graph, std::int64_t times) {
      return timer_.seconds_per_call(times, [&] { graph.replay(place_.stream()); });
    };
    const double call = seconds_of(lane, lane.calls);
    const double replay = replayed(*short_graph_, lane.calls);
    const double work =
        replayed(*long_graph_, std::max<std::int64_t>(1, lane.calls / kPassesOfALongGraph)) /
        kPassesOfALongGraph;
    call_overheads_.push_back(call - work);
    replay_overheads_.push_back(replay - work);
  }

 private:
  struct Lane {
    std::unique_ptr<BenchAttention> attention;
    std::int64_t calls = 1;  ///< of one measurement
    std::vector<double> seconds, peaks, fractions;
  };

  void run(Lane& lane) const { lane.attention->run(*tensors_); }

  double seconds_of(Lane& lane, std::int64_t calls) const {
    return timer_.seconds_per_call(calls, [&] { run(lane); });
  }

  double measure(Lane& lane) {
    const double before = peak_.run();
    const double seconds = seconds_of(lane, lane.calls);
    const double peak = (before + peak_.run()) / 2.0;
    lane.seconds.push_back(seconds);
    lane.peaks.push_back(peak);
    lane.fractions.push_back(flop_of_a_gpu() / seconds / peak);
    return seconds;
  }

  double flop_of_a_gpu() const { return problem_.useful_flop() / world_.comm.size(); }

  GpuRecord record_of(std::size_t which) const {
    constexpr double kTera = 1e12;
    const Lane& lane = lanes_[which];
    GpuRecord record;
    record.problem = problem_;
    record.schedule = kSchedules[which];
    record.ranks = world_.comm.size();
    record.kernels = place_.kernels().name;
    record.numerics = place_.kernels().numerics(problem_.dtype);
    record.transport = place_.transport(world_.comm).transport();
    record.seconds = median(lane.seconds);
    record.tflops = flop_of_a_gpu() / record.seconds / kTera;
    record.peak_tflops = median(lane.peaks) / kTera;
    record.fraction_of_peak = median(lane.fractions);
    record.spread = spread(lane.fractions);
    record.target = gpu_target(problem_, record.kernels);
    record.repetitions = static_cast<std::int64_t>(lane.seconds.size());
    if (record.schedule != ScheduleKind::canonical) return record;
    record.cost_over_arrival = median(costs_);
    if (problem_.seq_len > kChunkTokens) record.cost_target = 0.10;
    if (call_overheads_.empty()) return record;
    record.call_overhead_seconds = median(call_overheads_);
    record.replay_overhead_seconds = median(replay_overheads_);
    record.removed_overhead =
        removed_overhead_of(*record.call_overhead_seconds, *record.replay_overhead_seconds);
    record.removed_target = 0.80;
    return record;
  }

  BenchProblem problem_;
  const ShardPlace& place_;
  World& world_;
  const GpuTimer& timer_;
  const GpuPeak& peak_;
  std::vector<Lane> lanes_;  // by schedule
  std::unique_ptr<BenchTensors> tensors_;
  std::unique_ptr<OwnedGraph> short_graph_, long_graph_;
  std::vector<double> costs_, call_overheads_, replay_overheads_;
};

std::vector<BenchProblem> gpu_problems(const RunConfig& config) {
  const BenchSweep choice{{DType::bf16},
                          {MaskKind::full, MaskKind::causal},
                          {64, 128},
                          {1024, 8192, 16384},
                          {BenchPass::forward, BenchPass::backward}};
  std::vector<BenchProblem> problems = bench_problems(config, choice);
  for (BenchProblem& problem : problems) problem.out_dtype = problem.dtype;
  return problems;
}

std::int64_t longest_keys_bytes(const std::vector<BenchProblem>& problems) {
  std::int64_t bytes = 0;
  for (const BenchProblem& problem : problems) {
    bytes = std::max(bytes, problem.seq_len * problem.kv_heads * problem.head_dim *
                                static_cast<std::int64_t>(size_of(problem.dtype)));
  }
  return bytes;
}

}  // namespace

std::string GpuRecord::name() const {
  return fmt::format("gpu{}/{}/{}/d{}/s{}/{}/{}", suffix_of(problem.pass), kernels,
                     name_of(problem.dtype), problem.head_dim, problem.seq_len,
                     name_of(problem.mask), name_of(schedule));
}

std::optional<double> removed_overhead_of(double call_seconds, double replay_seconds) {
  if (!(call_seconds > 0.0)) return std::nullopt;
  return 1.0 - replay_seconds / call_seconds;
}

std::optional<double> gpu_target(const BenchProblem& problem, const std::string& kernels) {
  const bool is_promised = problem.dtype == DType::bf16 && problem.mask == MaskKind::causal &&
                           problem.head_dim == 128 && problem.seq_len >= 8192;
  if (!is_promised || problem.pass == BenchPass::both) return std::nullopt;
  const bool is_forward = problem.pass == BenchPass::forward;
  if (kernels == "cuda/sm90") return is_forward ? 0.75 : 0.60;
  return is_forward ? std::optional(0.45) : std::nullopt;
}

void run_gpu_suite(const GpuSuite& suite, World& world) {
  const ShardPlace place = ShardPlace::on_gpu(suite.config, world);
  const bool is_first = world.comm.rank() == 0;
  if (is_first) suite.on_gpu(place.description());
  Device& device = place.transport(world.comm).device();
  const CurrentDevice current(device);
  const bool is_judged = !place.is_double();
  const std::int64_t repetitions =
      suite.config.repetitions == 0 ? kDefaultRepetitions : suite.config.repetitions;
  const GpuTimer timer(place, world);
  const std::vector<BenchProblem> problems = gpu_problems(suite.config);
  for (const BenchProblem& problem : problems) {
    const GpuPeak peak(place.kernels(), problem.dtype, timer);
    GpuCase one(problem, suite, place, world, timer, peak);
    for (std::int64_t i = 0; i < repetitions; ++i) one.measure(i % 2 == 1);
    for (std::int64_t i = 0; i < repetitions; ++i) one.measure_launches();
    if (!is_first) continue;
    for (GpuRecord& record : one.records()) {
      if (!is_judged) record.target = record.cost_target = record.removed_target = std::nullopt;
      suite.on_record(record);
    }
  }
  const CopySettings copies{longest_keys_bytes(problems) * kKeysOfACopy, repetitions,
                            suite.run_seconds};
  for (GpuCopyRecord& record : measure_copies(copies, timer, device)) {
    if (!is_judged) record.target = std::nullopt;
    if (is_first) suite.on_copy(record);
  }
}

}  // namespace cpattn
