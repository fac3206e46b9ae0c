#include "launch/bench_ring.h"

#include <fmt/core.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "launch/bench_timing.h"
#include "src/base/error.h"
#include "src/comm/direct_exchange.h"
#include "src/comm/ring_exchange.h"

namespace cpattn {
namespace {

constexpr std::int64_t kDefaultRepetitions = 5;
constexpr std::array kSchedules{ScheduleKind::canonical, ScheduleKind::arrival};

/// What every rank knows of itself, gathered by all.
struct RankNumbers {
  double seconds = 0.0;
  double exposed_seconds = 0.0;
  double bytes_sent = 0.0;
  double peak_rss_bytes = 0.0;
};

RankNumbers largest_of_all(Communicator& comm, const RankNumbers& mine, Seconds timeout) {
  RankNumbers result = mine;
  const auto all = comm.all_gather(std::as_bytes(std::span(&mine, 1)), deadline_after(timeout),
                                   "numbers of a measurement");
  for (const std::vector<std::byte>& bytes : all) {
    RankNumbers other;
    invariant(bytes.size() == sizeof other, "numbers of ", bytes.size(), " bytes");
    std::memcpy(&other, bytes.data(), sizeof other);
    result.seconds = std::max(result.seconds, other.seconds);
    result.exposed_seconds = std::max(result.exposed_seconds, other.exposed_seconds);
    result.bytes_sent = std::max(result.bytes_sent, other.bytes_sent);
    result.peak_rss_bytes = std::max(result.peak_rss_bytes, other.peak_rss_bytes);
  }
  return result;
}

/// Lets the peak count from here, without what the last problem left in the heap. Where the system
/// does not (a Linux without clear_refs), the peak is that of everything so far.
void reset_peak_rss() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
  std::ofstream("/proc/self/clear_refs") << "5";
}

double peak_rss_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0;
}

/// One problem under both schedules.
class RingCase {
 public:
  RingCase(const BenchProblem& problem, const CpConfig& base, const KernelTable& kernels,
           World& world)
      : comm_(world.comm), timeout_(base.timeout_seconds) {
    reset_peak_rss();
    const bool is_oversubscribed =
        world.local_ranks * base.threads > ::sysconf(_SC_NPROCESSORS_ONLN);
    for (const ScheduleKind schedule : kSchedules) {
      CpConfig config = base;
      config.mask = problem.mask;
      config.schedule = schedule;
      attentions_.push_back(std::make_unique<BenchAttention>(problem, config, kernels, comm_));
      const Plan& plan = attentions_.back()->plan();
      RingSamples samples;
      samples.problem = problem;
      samples.schedule = schedule;
      samples.ranks = comm_.size();
      samples.is_oversubscribed = is_oversubscribed;
      samples.threads = plan.num_threads();
      samples.isa = name_of(kernels.isa);
      samples.transport = comm_.transport();
      std::size_t planned_bytes = plan.memory().total();
      if (const GradientPlan* gradient = attentions_.back()->gradient_plan())
        planned_bytes += gradient->memory_bytes();
      samples.planned_bytes_per_token =
          static_cast<double>(planned_bytes) /
          static_cast<double>(std::max<std::int64_t>(1, plan.shard().q_rows));
      samples_.push_back(std::move(samples));
    }
    const Shard& shard = attentions_.front()->plan().shard();
    tensors_ = std::make_unique<BenchTensors>(problem, shard.q_rows, shard.kv_rows, comm_.rank());
  }

  std::vector<RingSamples> run(std::int64_t repetitions) {
    attentions_.front()->forward(*tensors_);  // makes what a backward reads
    for (std::size_t i = 0; i < attentions_.size(); ++i) run_pass(i);
    for (std::int64_t turn = 0; turn < repetitions; ++turn) {
      for (std::size_t i = 0; i < attentions_.size(); ++i) {
        // Each schedule goes first as often as second.
        const std::size_t which = turn % 2 == 0 ? i : attentions_.size() - 1 - i;
        keep(which, run_pass(which));
      }
      if (comm_.size() > 1) transfer();
    }
    return samples_;
  }

 private:
  RankNumbers run_pass(std::size_t which) {
    BenchAttention& attention = *attentions_[which];
    const TransferStats before = attention.stats();
    comm_.barrier(deadline_after(timeout_), "start of a measurement");
    const Clock::time_point start = Clock::now();
    attention.run(*tensors_);
    RankNumbers mine{.seconds = Seconds(Clock::now() - start).count()};
    const TransferStats after = attention.stats();
    mine.exposed_seconds = after.exposed_seconds - before.exposed_seconds;
    mine.bytes_sent = static_cast<double>(after.bytes_sent - before.bytes_sent);
    mine.peak_rss_bytes = peak_rss_bytes();
    return largest_of_all(comm_, mine, timeout_);
  }

  void keep(std::size_t which, const RankNumbers& numbers) {
    RingSamples& samples = samples_[which];
    samples.seconds.push_back(numbers.seconds);
    samples.exposed_seconds.push_back(numbers.exposed_seconds);
    samples.bytes_sent = static_cast<std::int64_t>(numbers.bytes_sent);
    samples.peak_rss_bytes = static_cast<std::int64_t>(numbers.peak_rss_bytes);
  }

  // Of each schedule: how many pieces of dk, dv a backward sends depends on it.
  void transfer() {
    for (std::size_t i = 0; i < attentions_.size(); ++i) {
      double seconds = 0.0;
      const BenchAttention& attention = *attentions_[i];
      if (samples_[i].problem.pass != BenchPass::backward)
        seconds += forward_transfer(attention.plan());
      if (attention.gradient_plan() != nullptr)
        seconds += backward_transfer(attention.plan(), *attention.gradient_plan());
      samples_[i].transfer_seconds.push_back(seconds);
    }
  }

  // The hops of one forward with nothing to hide behind.
  double forward_transfer(const Plan& plan) {
    RingExchange ring(comm_, plan.ring().bytes(),
                      {.direction = plan.schedule().direction, .timeout = timeout_});
    return slowest([&] {
      for (int hop = 0; hop < comm_.size() - 1; ++hop) {
        ring.post();
        ring.wait();
      }
    });
  }

  // Likewise, in the order of RingGradient::backward().
  double backward_transfer(const Plan& plan, const GradientPlan& gradient) {
    RingExchange ring(comm_, gradient.ring().bytes(),
                      {.direction = plan.schedule().direction, .timeout = timeout_});
    DirectExchange pieces(comm_, gradient.max_bytes_out(), gradient.max_bytes_in(),
                          {.timeout = timeout_});
    const std::vector<GradientStep>& steps = gradient.schedule().steps;
    return slowest([&] {
      for (std::size_t step = 0; step < steps.size(); ++step) {
        ring.post();
        if (step > 1) pieces.wait();
        if (step > 0) {
          pieces.post({.step = static_cast<int>(step),
                       .to = steps[step].kv_owner,
                       .bytes_out = gradient.bytes_out(step),
                       .from = steps[step].pieces_from,
                       .bytes_in = gradient.bytes_in(step)});
        }
        ring.wait();
      }
      if (steps.size() > 1) pieces.wait();
    });
  }

  template <class Work>
  double slowest(Work&& work) {
    comm_.barrier(deadline_after(timeout_), "start of a transfer");
    const Clock::time_point start = Clock::now();
    work();
    const RankNumbers mine{.seconds = Seconds(Clock::now() - start).count()};
    return largest_of_all(comm_, mine, timeout_).seconds;
  }

  Communicator& comm_;
  Seconds timeout_;
  std::vector<std::unique_ptr<BenchAttention>> attentions_;  // by schedule
  std::vector<RingSamples> samples_;
  std::unique_ptr<BenchTensors> tensors_;
};

}  // namespace

std::vector<RingSamples> measure_ring(const RunConfig& config, World& world) {
  require(config.thread_counts.size() <= 1, "thread_counts: the ring suite takes one number");
  CpConfig base;
  base.sharding = ShardingKind::zigzag;
  base.threads = threads_per_rank(config.thread_counts.empty() ? 0 : config.thread_counts.front(),
                                  world.local_ranks);
  const BenchSweep choice{{DType::f32},
                          {MaskKind::causal},
                          {128},
                          {8192},
                          {BenchPass::forward, BenchPass::backward, BenchPass::both}};
  const std::int64_t repetitions =
      config.repetitions == 0 ? kDefaultRepetitions : config.repetitions;
  std::vector<RingSamples> all;
  for (const Isa isa : or_choice(config.isas, {default_kernels().isa})) {
    for (const BenchProblem& problem : bench_problems(config, choice)) {
      RingCase one(problem, base, find_kernels(isa), world);
      for (RingSamples& samples : one.run(repetitions)) all.push_back(std::move(samples));
    }
  }
  return all;
}

std::string samples_json(const std::vector<RingSamples>& samples) {
  nlohmann::json list = nlohmann::json::array();
  for (const RingSamples& one : samples) {
    list.push_back({{"dtype", name_of(one.problem.dtype)},
                    {"mask", name_of(one.problem.mask)},
                    {"head_dim", one.problem.head_dim},
                    {"seq_len", one.problem.seq_len},
                    {"heads", one.problem.heads},
                    {"kv_heads", one.problem.kv_heads},
                    {"pass", name_of(one.problem.pass)},
                    {"schedule", name_of(one.schedule)},
                    {"ranks", one.ranks},
                    {"threads", one.threads},
                    {"isa", one.isa},
                    {"transport", one.transport},
                    {"is_oversubscribed", one.is_oversubscribed},
                    {"seconds", one.seconds},
                    {"exposed_seconds", one.exposed_seconds},
                    {"transfer_seconds", one.transfer_seconds},
                    {"bytes_sent", one.bytes_sent},
                    {"peak_rss_bytes", one.peak_rss_bytes},
                    {"planned_bytes_per_token", one.planned_bytes_per_token}});
  }
  return list.dump();
}

std::vector<RingSamples> samples_from_json(const std::string& text) {
  std::vector<RingSamples> samples;
  try {
    for (const nlohmann::json& entry : nlohmann::json::parse(text)) {
      RingSamples one;
      one.problem.dtype = from_name<DType>(entry.at("dtype").get<std::string>()).value();
      one.problem.mask = from_name<MaskKind>(entry.at("mask").get<std::string>()).value();
      entry.at("head_dim").get_to(one.problem.head_dim);
      entry.at("seq_len").get_to(one.problem.seq_len);
      entry.at("heads").get_to(one.problem.heads);
      entry.at("kv_heads").get_to(one.problem.kv_heads);
      one.problem.pass = from_name<BenchPass>(entry.at("pass").get<std::string>()).value();
      one.schedule = from_name<ScheduleKind>(entry.at("schedule").get<std::string>()).value();
      entry.at("ranks").get_to(one.ranks);
      entry.at("threads").get_to(one.threads);
      entry.at("isa").get_to(one.isa);
      entry.at("transport").get_to(one.transport);
      entry.at("is_oversubscribed").get_to(one.is_oversubscribed);
      entry.at("seconds").get_to(one.seconds);
      entry.at("exposed_seconds").get_to(one.exposed_seconds);
      entry.at("transfer_seconds").get_to(one.transfer_seconds);
      entry.at("bytes_sent").get_to(one.bytes_sent);
      entry.at("peak_rss_bytes").get_to(one.peak_rss_bytes);
      entry.at("planned_bytes_per_token").get_to(one.planned_bytes_per_token);
      samples.push_back(std::move(one));
    }
  } catch (const std::exception& error) {
    throw InternalError(std::string("samples of a job: ") + error.what());
  }
  return samples;
}

std::string samples_path(const std::string& directory) { return directory + "/samples.json"; }

}  // namespace cpattn
