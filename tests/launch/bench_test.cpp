#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "launch/bench_gpu.h"
#include "launch/bench_kernels.h"
#include "launch/bench_report.h"
#include "launch/bench_ring.h"
#include "launch/bench_timing.h"
#include "src/base/error.h"
#include "src/comm/loopback_comm.h"

namespace cpattn {
namespace {

using Json = nlohmann::json;

constexpr std::array kRequiredKeys{
    "name",    "dtype",  "head_dim",    "seq_len",          "mask",
    "threads", "gflops", "peak_gflops", "fraction_of_peak", "ratio_to_peer"};

void expect_required_keys(const Json& record) {
  for (const char* key : kRequiredKeys) EXPECT_TRUE(record.contains(key)) << key;
}

/// Small enough to take no time.
RunConfig tiny_config() {
  RunConfig config;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dims = {16};
  config.seq_lens = {150};
  config.repetitions = 2;
  return config;
}

TEST(BenchGpu, NoShareIsTakenOfAnOverheadThatIsNotThere) {
  EXPECT_DOUBLE_EQ(removed_overhead_of(10e-6, 2e-6).value(), 0.8);
  EXPECT_EQ(removed_overhead_of(0.0, 2e-6), std::nullopt);
  EXPECT_EQ(removed_overhead_of(-1e-6, 2e-6), std::nullopt);
}

TEST(BenchTiming, MedianAndSpread) {
  EXPECT_EQ(median({3.0, 1.0, 2.0}), 2.0);
  EXPECT_EQ(median({4.0, 1.0, 2.0, 3.0}), 2.5);
  EXPECT_EQ(spread({4.0, 1.0, 2.0}), 1.5);
  EXPECT_THROW(median({}), InternalError);
}

TEST(BenchTiming, WorkTakesProcessorTime) {
  const PeakBurst burst(default_kernels(), DType::f32, 1);
  int calls = 0;

  const Elapsed elapsed = time_work(1, 3, [&] {
    burst.run();
    ++calls;
  });

  EXPECT_EQ(calls, 3);
  EXPECT_GT(elapsed.cpu_seconds, 0.0);
  EXPECT_GE(elapsed.wall_seconds, elapsed.cpu_seconds * 0.99);  // two clocks
}

TEST(BenchTiming, EveryThreadRunsOnce) {
  std::array<int, 3> calls{};

  run_threads(3, [&](int thread) { ++calls[static_cast<std::size_t>(thread)]; });

  EXPECT_EQ(calls, (std::array<int, 3>{1, 1, 1}));
}

TEST(BenchTiming, EveryTableBurns) {
  for (const KernelTable* table : available_kernels()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const double flop = table->burn({.dtype = dtype, .rounds = 10});
      EXPECT_GT(flop, 0.0) << table->name;
      EXPECT_EQ(table->burn({.dtype = dtype, .rounds = 20}), 2 * flop) << table->name;
    }
  }
}

TEST(BenchProblem, UsefulFlop) {
  BenchProblem problem{DType::f32, MaskKind::full, 128, 2048, 8, 2};
  EXPECT_EQ(problem.useful_flop(), 4.0 * 2048 * 2048 * 128 * 8);

  problem.mask = MaskKind::causal;
  EXPECT_EQ(problem.useful_flop(), 2.0 * 2048 * 2048 * 128 * 8);

  problem.pass = BenchPass::backward;
  EXPECT_EQ(problem.useful_flop(), 5.0 * 2048 * 2048 * 128 * 8);

  problem.pass = BenchPass::both;
  EXPECT_EQ(problem.useful_flop(), 7.0 * 2048 * 2048 * 128 * 8);
}

TEST(BenchKernels, TargetsAreThoseOfThePage) {
  const KernelTable& generic = find_kernels(Isa::generic);
  const auto target = [](const KernelTable& kernels, DType dtype, MaskKind mask, std::int64_t dim,
                         std::int64_t tokens, BenchPass pass = BenchPass::forward) {
    return target_fraction({dtype, mask, dim, tokens, 8, 8, pass}, kernels);
  };
  EXPECT_FALSE(target(generic, DType::f32, MaskKind::full, 128, 2048));
  for (const KernelTable* table : available_kernels()) {
    if (table->isa == Isa::generic) continue;
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::full, 128, 2048), 0.85);
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::causal, 128, 8192), 0.80);
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::full, 64, 2048), 0.80);
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::causal, 64, 2048), 0.75);
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::causal, 64, 512), 0.75);
    EXPECT_FALSE(target(*table, DType::f32, MaskKind::causal, 64, 128));
    const bool has_dot = table->numerics(DType::bf16).starts_with("bf16-dot");
    EXPECT_EQ(target(*table, DType::bf16, MaskKind::full, 128, 2048).value_or(0.0),
              has_dot ? 0.75 : 0.0);
    EXPECT_DOUBLE_EQ(*target(*table, DType::f32, MaskKind::causal, 64, 2048, BenchPass::backward),
                     0.75);
    EXPECT_EQ(
        target(*table, DType::bf16, MaskKind::full, 64, 2048, BenchPass::backward).value_or(0.0),
        has_dot ? 0.65 : 0.0);
    EXPECT_FALSE(target(*table, DType::f32, MaskKind::full, 128, 512, BenchPass::backward));
    EXPECT_FALSE(target(*table, DType::f32, MaskKind::full, 128, 2048, BenchPass::both));
  }
}

TEST(BenchKernels, SuiteMeasuresEveryCase) {
  RunConfig config = tiny_config();
  config.dtypes = {DType::f32, DType::bf16};
  config.thread_counts = {1, 2};
  const auto peer = OpenBlasPeer::load();
  std::vector<KernelRecord> records;

  run_kernel_suite({.config = config,
                    .peer = peer.get(),
                    .on_record = [&](const KernelRecord& record) { records.push_back(record); },
                    .run_seconds = 1e-4});

  std::size_t isas = 0;
  for (const KernelTable* table : available_kernels()) isas += table->isa != Isa::generic ? 1 : 0;
  ASSERT_EQ(records.size(),
            std::max<std::size_t>(isas, 1) * 2 * 2 * 2 * 2);  // dtypes masks passes threads
  for (const KernelRecord& record : records) {
    EXPECT_GT(record.fraction_of_peak, 0.0) << record.name();
    EXPECT_LT(record.fraction_of_peak, 1.2) << record.name();
    EXPECT_EQ(record.repetitions, 2);
    EXPECT_EQ(record.thread_scaling.has_value(), record.threads == 2);
    EXPECT_GT(record.ratio_to_peer.value_or(1.0), 0.0);
    EXPECT_LE(record.ratio_to_peer.has_value(), peer != nullptr);
    EXPECT_LE(record.ratio_to_peer.has_value(), record.problem.pass == BenchPass::forward);
  }
  const Json json = Json::parse(bench_json(describe_run("kernels", "cpattn bench"), records));
  ASSERT_EQ(json.at("records").size(), records.size());
  for (const Json& record : json.at("records")) expect_required_keys(record);
  EXPECT_FALSE(json.at("cpu").get<std::string>().empty());
  EXPECT_FALSE(kernel_row(records.front()).empty());
}

TEST(BenchRing, SamplesOfTwoRanks) {
  RunConfig config = tiny_config();
  config.thread_counts = {1};
  std::vector<RingSamples> samples;

  LoopbackWorld(2).run([&](Communicator& comm) {
    World world{comm, 2};
    const auto mine = measure_ring(config, world);
    if (comm.rank() == 0) samples = mine;
  });

  ASSERT_EQ(samples.size(), 6u);  // forward, backward, both; canonical, arrival
  for (const RingSamples& one : samples) {
    EXPECT_EQ(one.ranks, 2);
    EXPECT_EQ(one.seconds.size(), 2u);
    EXPECT_EQ(one.exposed_seconds.size(), 2u);
    EXPECT_EQ(one.transfer_seconds.size(), 2u);
    EXPECT_GT(one.peak_rss_bytes, 0);
    EXPECT_GT(one.planned_bytes_per_token, 0.0);
  }
  const Json json =
      Json::parse(bench_json(describe_run("ring", "cpattn"), ring_records({samples})));
  for (const Json& record : json.at("records")) expect_required_keys(record);
  EXPECT_EQ(json.at("records").at(0).at("ranks"), 2);
  EXPECT_EQ(json.at("records").at(0).at("pass"), "forward");
  EXPECT_EQ(json.at("records").at(2).at("pass"), "backward");
  EXPECT_EQ(json.at("records").at(4).at("pass"), "both");
}

TEST(BenchRing, BytesAreThoseOfThePlans) {
  RunConfig config = tiny_config();
  config.seq_lens = {2100};  // more than one chunk for each of two ranks
  config.repetitions = 1;
  config.thread_counts = {1};
  LoopbackWorld(2).run([&](Communicator& comm) {
    World world{comm, 2};
    for (const RingSamples& one : measure_ring(config, world)) {
      CpConfig cp_config;
      cp_config.mask = one.problem.mask;
      cp_config.schedule = one.schedule;
      std::size_t forward = 0, backward = 0;  // the most of any rank
      for (int rank = 0; rank < 2; ++rank) {
        const Plan plan(one.problem.problem(), cp_config, default_kernels(), rank, 2);
        forward = std::max(forward, plan.bytes_on_wire());
        backward = std::max(backward, GradientPlan(plan).bytes_on_wire());
      }
      switch (one.problem.pass) {
        case BenchPass::forward:
          EXPECT_EQ(one.bytes_sent, forward);
          break;
        case BenchPass::backward:
          EXPECT_EQ(one.bytes_sent, backward);
          break;
        case BenchPass::both:  // the most of the sums
          EXPECT_LE(one.bytes_sent, forward + backward);
          EXPECT_GT(one.bytes_sent, std::max(forward, backward));
          break;
      }
    }
  });
}

/// Samples as if measured: `seconds` twice.
RingSamples made(ScheduleKind schedule, int ranks, double seconds,
                 BenchPass pass = BenchPass::forward) {
  RingSamples samples;
  samples.problem = {DType::f32, MaskKind::causal, 64, 1000, 8, 8, pass};
  samples.schedule = schedule;
  samples.ranks = ranks;
  samples.isa = "avx2";
  samples.seconds = {seconds, seconds};
  samples.exposed_seconds = {0.1, 0.1};
  if (ranks > 1) samples.transfer_seconds = {0.4, 0.4};
  return samples;
}

TEST(BenchRing, RecordsCompareWithinTheirTurn) {
  std::vector<std::vector<RingSamples>> turns;
  for (const double mood : {1.0, 3.0, 7.0}) {  // the machine gets slower from turn to turn
    turns.push_back({made(ScheduleKind::canonical, 1, 2.0 * mood),
                     made(ScheduleKind::canonical, 2, 2.5 * mood),
                     made(ScheduleKind::arrival, 2, 2.0 * mood)});
  }

  const std::vector<RingRecord> records = ring_records(turns);

  ASSERT_EQ(records.size(), 3u);
  EXPECT_FALSE(records[0].ratio_to_baseline);
  EXPECT_FALSE(records[0].hidden_share);
  EXPECT_DOUBLE_EQ(*records[1].ratio_to_baseline, 0.8);
  EXPECT_DOUBLE_EQ(*records[1].ratio_target, 0.95);
  EXPECT_DOUBLE_EQ(*records[1].cost_over_arrival, 0.25);
  EXPECT_DOUBLE_EQ(*records[1].hidden_share, 0.75);
  EXPECT_DOUBLE_EQ(records[1].seconds, 7.5);
  EXPECT_EQ(records[1].repetitions, 6);
  EXPECT_FALSE(records[2].ratio_to_baseline);  // no arrival run of one rank to compare with
  EXPECT_NE(ring_table(records).find("BELOW"), std::string::npos);
}

TEST(BenchRing, EveryPassHasItsOwnBaselineAndGoals) {
  std::vector<RingSamples> turn;
  double seconds = 1.0;
  for (const BenchPass pass : {BenchPass::forward, BenchPass::backward, BenchPass::both}) {
    turn.push_back(made(ScheduleKind::canonical, 1, seconds, pass));
    turn.push_back(made(ScheduleKind::canonical, 2, 2.0 * seconds, pass));
    turn.push_back(made(ScheduleKind::arrival, 2, seconds, pass));
    turn.push_back(made(ScheduleKind::canonical, 4, 4.0 * seconds, pass));
    turn.back().is_oversubscribed = true;
    seconds *= 3.0;
  }

  const std::vector<RingRecord> records = ring_records({turn});

  for (std::size_t i = 0; i < records.size(); i += 4) {
    EXPECT_DOUBLE_EQ(*records[i + 1].ratio_to_baseline, 0.5);
    EXPECT_DOUBLE_EQ(*records[i + 1].cost_over_arrival, 1.0);
    EXPECT_DOUBLE_EQ(*records[i + 3].ratio_to_baseline, 0.25);
  }
  const auto goals = [&](std::size_t first) {
    return std::array{records[first + 1].ratio_target, records[first + 1].cost_target,
                      records[first + 3].ratio_target};
  };
  using Goals = std::array<std::optional<double>, 3>;
  EXPECT_EQ(goals(0), (Goals{0.95, 0.03, 0.85}));
  EXPECT_EQ(goals(4), (Goals{std::nullopt, 0.10, std::nullopt}));
  EXPECT_EQ(goals(8), (Goals{0.93, 0.10, std::nullopt}));
  EXPECT_DOUBLE_EQ(records[8].gflops(), 3.5 / 9.0 * records[0].gflops());  // 14 / 4 of the flop
  EXPECT_EQ(records[0].name(), "ring/r1t1/avx2/f32/d64/s1000/causal/canonical");
  EXPECT_EQ(records[4].name(), "ring_gradient/r1t1/avx2/f32/d64/s1000/causal/canonical");
  EXPECT_EQ(records[8].name(), "ring_and_gradient/r1t1/avx2/f32/d64/s1000/causal/canonical");
}

TEST(BenchRing, SamplesSurviveAFile) {
  const std::vector<RingSamples> samples{made(ScheduleKind::arrival, 4, 0.1, BenchPass::both)};

  const std::vector<RingSamples> read = samples_from_json(samples_json(samples));

  EXPECT_EQ(samples_json(read), samples_json(samples));
  EXPECT_EQ(read.front().seconds, samples.front().seconds);
  EXPECT_EQ(read.front().problem.pass, BenchPass::both);
  EXPECT_THROW(samples_from_json(""), InternalError);
  EXPECT_THROW(samples_from_json("[{}]"), InternalError);
}

}  // namespace
}  // namespace cpattn
