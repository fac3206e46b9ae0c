#include "launch/bench_kernels.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "launch/bench_timing.h"
#include "launch/world.h"
#include "src/base/error.h"
#include "src/comm/loopback_comm.h"

namespace cpattn {
namespace {

constexpr std::int64_t kDefaultRepetitions = 9;

bool is_bf16_dot(const KernelTable& kernels, DType dtype) {
  return kernels.numerics(dtype).starts_with("bf16-dot");
}

std::int64_t runs_that_fill(double seconds, double seconds_of_one) {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(seconds / seconds_of_one)), 1,
                                  10000);
}

/// Everything measured of one thread count of one case.
struct ThreadCase {
  ThreadCase(const BenchProblem& problem, const KernelTable& kernels, int thread_count,
             Communicator& comm)
      : threads(thread_count),
        attention(problem, config_of(problem, thread_count), kernels, comm),
        burst(kernels, problem.dtype, thread_count) {}

  static CpConfig config_of(const BenchProblem& problem, int threads) {
    CpConfig config;
    config.mask = problem.mask;
    config.sharding = ShardingKind::contiguous;  // rows in their own order, as the peer has them
    config.threads = threads;
    return config;
  }

  int threads;
  BenchAttention attention;
  PeakBurst burst;
  std::int64_t runs = 1;  ///< of the kernel, per measurement
  std::int64_t peer_runs = 1;
  std::vector<double> rates, peaks, fractions, shares, scalings, peer_rates, ratios;
};

/// How every case is measured.
struct CaseSettings {
  std::vector<std::int64_t> thread_counts;
  OpenBlasPeer* peer = nullptr;
  double run_seconds = 0.0;
};

/// One problem on one table of kernels.
class KernelCase {
 public:
  KernelCase(const BenchProblem& problem, const KernelTable& kernels, const CaseSettings& settings,
             Communicator& comm)
      : problem_(problem),
        kernels_(kernels),
        peer_(settings.peer),
        run_seconds_(settings.run_seconds),
        tensors_(problem, problem.seq_len, problem.seq_len, 0) {
    for (const std::int64_t threads : settings.thread_counts) {
      cases_.emplace_back(problem, kernels, static_cast<int>(threads), comm);
    }
    if (peer_ != nullptr) {
      peer_out_ =
          Buffer(static_cast<std::size_t>(problem.seq_len * problem.heads * problem.head_dim) *
                 sizeof(float));
    }
    warm_up();
  }

  void measure() {
    for (ThreadCase& threads : cases_) measure(threads);
  }

  std::vector<KernelRecord> records() const {
    std::vector<KernelRecord> records;
    for (const ThreadCase& threads : cases_) records.push_back(record_of(threads));
    return records;
  }

 private:
  void run(ThreadCase& threads) { threads.attention.run(tensors_); }

  void attend_as_peer(const ThreadCase& threads) {
    const ForwardTensors tensors = tensors_.tensors();
    peer_->attend({tensors.q, tensors.k, tensors.v, problem_.mask, threads.threads},
                  peer_out_.as<float>());
  }

  // Twice: fresh memory costs page faults. The second run says how many fill a measurement.
  void warm_up() {
    for (ThreadCase& threads : cases_) {
      threads.attention.forward(tensors_);  // makes what the backward reads
      run(threads);
      threads.runs = runs_that_fill(
          run_seconds_, time_work(threads.threads, 1, [&] { run(threads); }).cpu_seconds);
      if (peer_ == nullptr) continue;
      attend_as_peer(threads);
      settle();
      threads.peer_runs = runs_that_fill(run_seconds_, time_work(threads.threads, 1, [&] {
                                                         attend_as_peer(threads);
                                                       }).cpu_seconds);
    }
    if (peer_ != nullptr) check_peer();
  }

  // Both are sums of seq_len products after exponentials of sums of head_dim products, in f32; to
  // first order each product adds at most one rounding of the result's size.
  void check_peer() const {
    const auto* ours = static_cast<const float*>(tensors_.tensors().out.data);
    const auto* theirs = peer_out_.as<float>();
    const std::int64_t count = problem_.seq_len * problem_.heads * problem_.head_dim;
    double difference = 0.0, norm = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
      const double delta = static_cast<double>(theirs[i]) - ours[i];
      difference += delta * delta;
      norm += static_cast<double>(ours[i]) * ours[i];
    }
    const double error = std::sqrt(difference / norm);
    const double bound =
        epsilon(DType::f32) * static_cast<double>(problem_.seq_len + problem_.head_dim);
    require<InternalError>(error <= bound, "the peer's attention differs from ours by ", error,
                           " (relative L2), expected at most ", bound);
  }

  void measure(ThreadCase& threads) {
    settle();
    const double before = threads.burst.run();
    const Elapsed ours = time_work(threads.threads, threads.runs, [&] { run(threads); });
    settle();
    const double after = threads.burst.run();
    const double rate =
        problem_.useful_flop() * static_cast<double>(threads.runs) / ours.cpu_seconds;
    const double peak = (before + after) / 2.0;
    threads.rates.push_back(rate);
    threads.peaks.push_back(peak);
    threads.fractions.push_back(rate / peak);
    threads.shares.push_back(ours.cpu_seconds / ours.wall_seconds);
    threads.scalings.push_back(rate / cases_.front().rates.back());
    if (peer_ == nullptr) return;
    const Elapsed theirs =
        time_work(threads.threads, threads.peer_runs, [&] { attend_as_peer(threads); });
    const double peer_rate =
        problem_.useful_flop() * static_cast<double>(threads.peer_runs) / theirs.cpu_seconds;
    threads.peer_rates.push_back(peer_rate);
    threads.ratios.push_back(rate / peer_rate);
  }

  KernelRecord record_of(const ThreadCase& threads) const {
    constexpr double kGiga = 1e9;
    KernelRecord record;
    record.problem = problem_;
    record.isa = name_of(kernels_.isa);
    record.numerics = kernels_.numerics(problem_.dtype);
    record.schedule = threads.attention.plan().config().schedule;
    record.threads = threads.threads;
    record.gflops = median(threads.rates) / kGiga;
    record.peak_gflops = median(threads.peaks) / kGiga;
    record.fraction_of_peak = median(threads.fractions);
    record.spread = spread(threads.fractions);
    record.cpu_share = median(threads.shares);
    record.repetitions = static_cast<std::int64_t>(threads.rates.size());
    if (threads.threads == 1) record.target = target_fraction(problem_, kernels_);
    if (threads.threads != cases_.front().threads) record.thread_scaling = median(threads.scalings);
    if (peer_ != nullptr) {
      record.peer_gflops = median(threads.peer_rates) / kGiga;
      record.ratio_to_peer = median(threads.ratios);
      if (problem_.seq_len >= 2048) {
        record.peer_target = problem_.mask == MaskKind::causal ? 1.25 : 1.2;
      }
    }
    return record;
  }

  BenchProblem problem_;
  const KernelTable& kernels_;
  OpenBlasPeer* peer_;
  double run_seconds_;
  BenchTensors tensors_;
  Buffer peer_out_;
  std::deque<ThreadCase> cases_;
};

/// As target_fraction, of one thread.
std::optional<double> backward_target(const BenchProblem& problem, const KernelTable& kernels) {
  if (problem.seq_len < 2048) return std::nullopt;
  if (is_bf16_dot(kernels, problem.dtype)) return 0.65;
  return problem.dtype == DType::f32 ? std::optional(0.75) : std::nullopt;
}

/// The generic kernels have no instruction of their own to measure up to where others exist.
std::vector<Isa> isas_here() {
  std::vector<Isa> isas;
  for (const KernelTable* table : available_kernels()) isas.push_back(table->isa);
  if (isas.size() > 1) std::erase(isas, Isa::generic);
  return isas;
}

std::vector<std::int64_t> threads_here() {
  const std::int64_t cores = usable_cores();
  return cores == 1 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{1, cores};
}

void run_cases(const KernelSuite& suite, Communicator& comm) {
  const RunConfig& config = suite.config;
  const BenchSweep choice{{DType::f32, DType::bf16},
                          {MaskKind::full, MaskKind::causal},
                          {64, 128},
                          {512, 2048},
                          {BenchPass::forward, BenchPass::backward}};
  const std::vector<Isa> isas = or_choice(config.isas, isas_here());
  const std::vector<std::int64_t> thread_counts = or_choice(config.thread_counts, threads_here());
  const std::int64_t repetitions =
      config.repetitions == 0 ? kDefaultRepetitions : config.repetitions;
  for (const Isa isa : isas) {
    for (const BenchProblem& problem : bench_problems(config, choice)) {
      const bool has_peer =
          problem.pass == BenchPass::forward && problem.dtype == DType::f32 && isa == isas.back();
      const CaseSettings settings{thread_counts, has_peer ? suite.peer : nullptr,
                                  suite.run_seconds};
      KernelCase one(problem, find_kernels(isa), settings, comm);
      for (std::int64_t i = 0; i < repetitions; ++i) one.measure();
      for (const KernelRecord& record : one.records()) suite.on_record(record);
    }
  }
}

}  // namespace

std::string KernelRecord::name() const {
  return fmt::format("attention{}/{}/{}/d{}/s{}/{}/t{}", suffix_of(problem.pass), isa,
                     name_of(problem.dtype), problem.head_dim, problem.seq_len,
                     name_of(problem.mask), threads);
}

std::optional<double> target_fraction(const BenchProblem& problem, const KernelTable& kernels) {
  const bool is_wide = problem.head_dim >= 128, is_causal = problem.mask == MaskKind::causal;
  if (kernels.isa == Isa::generic || kernels.isa == Isa::neon) return std::nullopt;
  if (problem.head_dim < 64 || problem.seq_len < 512) return std::nullopt;
  if (problem.pass == BenchPass::both) return std::nullopt;
  if (problem.pass == BenchPass::backward) return backward_target(problem, kernels);
  if (is_bf16_dot(kernels, problem.dtype)) {
    if (problem.seq_len < 2048) return std::nullopt;
    return is_wide ? 0.75 : 0.70;
  }
  if (problem.dtype != DType::f32) return std::nullopt;
  if (problem.seq_len < 2048) return 0.75;
  return (is_wide ? 0.85 : 0.80) - (is_causal ? 0.05 : 0.0);
}

void run_kernel_suite(const KernelSuite& suite) {
  LoopbackWorld(1).run([&](Communicator& comm) { run_cases(suite, comm); });
}

}  // namespace cpattn
