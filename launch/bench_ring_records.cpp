// From the samples of several turns to one record per size, problem and schedule.
#include <fmt/core.h>

#include <algorithm>

#include "launch/bench_ring.h"
#include "launch/bench_timing.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// Of the time of one rank's; nothing where this project promises nothing.
std::optional<double> ratio_target(BenchPass pass, bool is_oversubscribed) {
  switch (pass) {
    case BenchPass::forward:
      return is_oversubscribed ? 0.85 : 0.95;
    case BenchPass::backward:
      return std::nullopt;
    case BenchPass::both:
      return is_oversubscribed ? std::nullopt : std::optional(0.93);
  }
  return std::nullopt;
}

/// Of canonical over arrival. A backward may pay more than a forward: what it sends home of dk, dv
/// are whole tree nodes, several for a chunk, where arrival sends one sum.
double cost_target(BenchPass pass) { return pass == BenchPass::forward ? 0.03 : 0.10; }

bool is_same_problem(const RingSamples& a, const RingSamples& b) {
  return a.problem.dtype == b.problem.dtype && a.problem.mask == b.problem.mask &&
         a.problem.head_dim == b.problem.head_dim && a.problem.seq_len == b.problem.seq_len &&
         a.problem.pass == b.problem.pass && a.isa == b.isa;
}

/// Index of the entry of the same problem that `wanted` accepts; -1 when there is none.
template <class Wanted>
int find_entry(const std::vector<RingSamples>& turn, const RingSamples& like, Wanted&& wanted) {
  for (std::size_t i = 0; i < turn.size(); ++i) {
    if (is_same_problem(turn[i], like) && wanted(turn[i])) return static_cast<int>(i);
  }
  return -1;
}

void append(std::vector<double>& to, const std::vector<double>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Median over the turns of f(turn).
template <class Function>
double median_over(const std::vector<std::vector<RingSamples>>& turns, Function&& f) {
  std::vector<double> values;
  for (const std::vector<RingSamples>& turn : turns) values.push_back(f(turn));
  return median(std::move(values));
}

void compare_with_baseline(const std::vector<std::vector<RingSamples>>& turns, std::size_t index,
                           RingRecord& record) {
  const RingSamples& mine = turns.front()[index];
  const int found = find_entry(turns.front(), mine, [&](const RingSamples& other) {
    return other.schedule == mine.schedule && other.ranks == 1;
  });
  if (found < 0 || mine.ranks == 1) return;
  const auto baseline = static_cast<std::size_t>(found);
  record.ratio_to_baseline = median_over(turns, [&](const std::vector<RingSamples>& turn) {
    return median(turn[baseline].seconds) / median(turn[index].seconds);
  });
  if (mine.schedule != ScheduleKind::canonical) return;
  record.ratio_target = ratio_target(mine.problem.pass, mine.is_oversubscribed);
}

void compare_with_arrival(const std::vector<std::vector<RingSamples>>& turns, std::size_t index,
                          RingRecord& record) {
  const RingSamples& mine = turns.front()[index];
  if (mine.schedule != ScheduleKind::canonical) return;
  const int found = find_entry(turns.front(), mine, [&](const RingSamples& other) {
    return other.schedule == ScheduleKind::arrival && other.ranks == mine.ranks;
  });
  if (found < 0) return;
  const auto arrival = static_cast<std::size_t>(found);
  std::vector<double> costs;
  for (const std::vector<RingSamples>& turn : turns) {
    for (std::size_t i = 0; i < turn[index].seconds.size(); ++i) {
      costs.push_back(turn[index].seconds[i] / turn[arrival].seconds[i] - 1.0);
    }
  }
  record.cost_over_arrival = median(std::move(costs));
  record.cost_target = cost_target(mine.problem.pass);
}

}  // namespace

double RingRecord::tokens_per_second() const {
  return static_cast<double>(samples.problem.seq_len) / seconds;
}

double RingRecord::gflops() const { return samples.problem.useful_flop() / seconds / 1e9; }

std::string RingRecord::name() const {
  const BenchProblem& problem = samples.problem;
  return fmt::format("ring{}/r{}t{}/{}/{}/d{}/s{}/{}/{}", suffix_of(problem.pass), samples.ranks,
                     samples.threads, samples.isa, name_of(problem.dtype), problem.head_dim,
                     problem.seq_len, name_of(problem.mask), name_of(samples.schedule));
}

std::vector<RingRecord> ring_records(const std::vector<std::vector<RingSamples>>& turns) {
  std::vector<RingRecord> records;
  require<InternalError>(!turns.empty(), "no turn was measured");
  for (const auto& turn : turns) {
    require<InternalError>(turn.size() == turns.front().size(), "a turn of ", turn.size(),
                           " measurements beside one of ", turns.front().size());
  }
  for (std::size_t i = 0; i < turns.front().size(); ++i) {
    RingRecord record;
    record.samples = turns.front()[i];
    for (std::size_t turn = 1; turn < turns.size(); ++turn) {
      const RingSamples& more = turns[turn][i];
      append(record.samples.seconds, more.seconds);
      append(record.samples.exposed_seconds, more.exposed_seconds);
      append(record.samples.transfer_seconds, more.transfer_seconds);
      record.samples.peak_rss_bytes = std::max(record.samples.peak_rss_bytes, more.peak_rss_bytes);
    }
    record.seconds = median(record.samples.seconds);
    record.spread = spread(record.samples.seconds);
    record.exposed_seconds = median(record.samples.exposed_seconds);
    record.repetitions = static_cast<std::int64_t>(record.samples.seconds.size());
    if (!record.samples.transfer_seconds.empty()) {
      record.transfer_seconds = median(record.samples.transfer_seconds);
      if (!record.samples.is_oversubscribed)
        record.hidden_share = 1.0 - record.exposed_seconds / *record.transfer_seconds;
    }
    compare_with_baseline(turns, i, record);
    compare_with_arrival(turns, i, record);
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace cpattn
