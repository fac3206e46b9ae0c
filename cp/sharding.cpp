#include "cp/sharding.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn {
namespace {

/// Chunks [begin, end) of one document.
struct Run {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The runs of one share of a document (one, or two for zigzag).
using Share = std::array<Run, 2>;

/// P runs of neighbouring chunks, longer ones first.
std::vector<Share> contiguous_shares(std::int64_t num_chunks, int parts) {
  std::vector<Share> shares(static_cast<std::size_t>(parts));
  for (int p = 0; p < parts; ++p) {
    shares[static_cast<std::size_t>(p)][0] = {ceil_div(p * num_chunks, std::int64_t{parts}),
                                              ceil_div((p + 1) * num_chunks, std::int64_t{parts})};
  }
  return shares;
}

/// Work of chunks [begin, end) in units of chunk pairs: chunk c sees c + 1/2 chunks when causal.
double chunk_work(const Run& run, MaskKind mask) {
  const auto begin = static_cast<double>(run.begin), end = static_cast<double>(run.end);
  return mask == MaskKind::causal ? (end * end - begin * begin) / 2.0 : end - begin;
}

double share_work(const Share& share, MaskKind mask) {
  return chunk_work(share[0], mask) + chunk_work(share[1], mask);
}

double share_chunks(const Share& share) {
  return static_cast<double>(share[0].end - share[0].begin + share[1].end - share[1].begin);
}

/// The front and back run of `left` that come nearest to the mean of what is left for `parts`
/// ranks, in work and, weighted by `token_weight`, in chunks.
Share outer_pair(const Run& left, std::int64_t base, int parts, MaskKind mask,
                 double token_weight) {
  const std::int64_t num_left = left.end - left.begin;
  const double mean_chunks = static_cast<double>(num_left) / parts;
  const double mean_work = chunk_work(left, mask) / parts;
  double least = std::numeric_limits<double>::infinity();
  Share choice{};
  for (std::int64_t back = std::max<std::int64_t>(base - 1, 0); back <= base + 1; ++back) {
    for (std::int64_t front = 0; front <= std::min(4 * base + 5, num_left - back); ++front) {
      const Share share{Run{left.begin, left.begin + front}, Run{left.end - back, left.end}};
      const double cost = std::abs(share_work(share, mask) - mean_work) / mean_work +
                          token_weight * std::abs(share_chunks(share) - mean_chunks) / mean_chunks +
                          1e-6 * static_cast<double>(std::abs(front - back));
      if (cost < least) {
        least = cost;
        choice = share;
      }
    }
  }
  return choice;
}

std::vector<Share> pair_from_outside(std::int64_t num_chunks, int parts, MaskKind mask,
                                     double token_weight) {
  std::vector<Share> shares;
  Run left{0, num_chunks};
  for (int p = 0; p + 1 < parts && left.begin < left.end; ++p) {
    shares.push_back(outer_pair(left, num_chunks / (2 * parts), parts - p, mask, token_weight));
    left = {shares.back()[0].end, shares.back()[1].begin};
  }
  shares.push_back({left, Run{}});
  shares.resize(static_cast<std::size_t>(parts));
  return shares;
}

/// 2P runs paired from the outside in; num_chunks a multiple of 2P is the classic zigzag of equal
/// runs. Otherwise the lengths must give: chunks are kept even as long as that costs no more than 5
/// % of balance of the work, and traded for it step by step after that (found by enumeration to
/// suffice for 64 and more chunks on up to 8 ranks).
std::vector<Share> zigzag_shares(std::int64_t num_chunks, int parts, MaskKind mask) {
  constexpr double kGoodEnough = 1.05;
  double least = std::numeric_limits<double>::infinity();
  std::vector<Share> choice(static_cast<std::size_t>(parts));
  if (num_chunks == 0) return choice;
  const double mean = chunk_work({0, num_chunks}, mask) / parts;
  for (const double token_weight : {1.0, 0.3, 0.1, 0.05}) {
    const auto shares = pair_from_outside(num_chunks, parts, mask, token_weight);
    double busiest = 0.0;
    for (const Share& share : shares) busiest = std::max(busiest, share_work(share, mask));
    if (busiest < least) {
      least = busiest;
      choice = shares;
    }
    if (least <= kGoodEnough * mean) break;
  }
  return choice;
}

std::vector<Share> shares_of(std::int64_t num_chunks, int parts, const CpConfig& config) {
  switch (config.sharding) {
    case ShardingKind::contiguous:
      return contiguous_shares(num_chunks, parts);
    case ShardingKind::zigzag:
      return zigzag_shares(num_chunks, parts, config.mask);
  }
  return {};
}

/// Cost of a share for the choice of the shift: its visible pairs, plus its tokens so that rows
/// which see little still count.
std::int64_t share_load(const Document& document, const Share& share, const CpConfig& config) {
  std::int64_t load = 0;
  for (const Run& run : share) {
    const std::int64_t first = std::min(run.begin * config.chunk_tokens, document.q_tokens);
    const std::int64_t last = std::min(run.end * config.chunk_tokens, document.q_tokens);
    load += visible_pairs(document, config.mask, first, last - first) + (last - first);
  }
  return load;
}

/// The rotation that leaves the busiest rank least busy.
int best_shift(const std::vector<std::int64_t>& loads, const std::vector<std::int64_t>& shares) {
  const std::size_t parts = loads.size();
  int best = 0;
  std::int64_t best_peak = std::numeric_limits<std::int64_t>::max();
  for (std::size_t shift = 0; shift < parts; ++shift) {
    std::int64_t peak = 0;
    for (std::size_t p = 0; p < parts; ++p) {
      // A rank that gets nothing is no busier than before and does not decide.
      if (shares[p] > 0) peak = std::max(peak, loads[(p + shift) % parts] + shares[p]);
    }
    if (peak < best_peak) {
      best_peak = peak;
      best = static_cast<int>(shift);
    }
  }
  return best;
}

/// Appends the chunks of a share; rows of the document start at `row_begin`.
void deal(std::int32_t document, const Share& share, std::int64_t tokens, std::int64_t row_begin,
          std::int64_t chunk_tokens, std::vector<OwnedChunk>& chunks, std::int64_t& rows) {
  for (const Run& run : share) {
    for (std::int64_t chunk = run.begin; chunk < run.end; ++chunk) {
      const std::int64_t first = chunk * chunk_tokens;
      const std::int64_t count = std::min(chunk_tokens, tokens - first);
      chunks.push_back({document, chunk, first, count, row_begin + first, rows});
      rows += count;
    }
  }
}

}  // namespace

double Sharding::imbalance() const {
  std::int64_t total = 0, busiest = 0;
  for (const Shard& shard : shards) {
    total += shard.visible_pairs;
    busiest = std::max(busiest, shard.visible_pairs);
  }
  if (total == 0) return 1.0;
  return static_cast<double>(busiest) * static_cast<double>(shards.size()) /
         static_cast<double>(total);
}

std::int64_t visible_pairs(const Document& document, MaskKind mask, std::int64_t first,
                           std::int64_t count) {
  if (mask == MaskKind::full) return count * document.kv_tokens;
  // Query i sees min(kv, max(0, i + 1 + kv - q)) keys: a run of zeros, then 1, 2, 3, ...; since i <
  // q the upper bound is never met.
  const std::int64_t shift = document.kv_tokens - document.q_tokens;
  const std::int64_t begin = std::max<std::int64_t>(first, -shift);
  const std::int64_t end = first + count;
  if (begin >= end) return 0;
  const std::int64_t least = begin + 1 + shift, most = end + shift;
  return (least + most) * (end - begin) / 2;
}

Sharding make_sharding(const SequenceBatch& batch, const CpConfig& config, int world_size) {
  require(world_size >= 1, "world_size ", world_size, ": expected at least 1");
  Sharding sharding;
  sharding.shards.resize(static_cast<std::size_t>(world_size));
  std::vector<std::int64_t> loads(static_cast<std::size_t>(world_size), 0);
  for (std::size_t d = 0; d < batch.documents.size(); ++d) {
    const Document& document = batch.documents[d];
    const auto q_shares =
        shares_of(ceil_div(document.q_tokens, config.chunk_tokens), world_size, config);
    const auto kv_shares =
        shares_of(ceil_div(document.kv_tokens, config.chunk_tokens), world_size, config);
    std::vector<std::int64_t> share_loads;
    for (const Share& share : q_shares) share_loads.push_back(share_load(document, share, config));
    const int shift = best_shift(loads, share_loads);
    for (int p = 0; p < world_size; ++p) {
      const auto part = static_cast<std::size_t>(p);
      const auto rank = static_cast<std::size_t>((p + shift) % world_size);
      Shard& shard = sharding.shards[rank];
      const auto id = narrow<std::int32_t>(d);
      const std::size_t first_new = shard.q.size();
      deal(id, q_shares[part], document.q_tokens, document.q_begin, config.chunk_tokens, shard.q,
           shard.q_rows);
      deal(id, kv_shares[part], document.kv_tokens, document.kv_begin, config.chunk_tokens,
           shard.kv, shard.kv_rows);
      for (std::size_t i = first_new; i < shard.q.size(); ++i) {
        shard.visible_pairs +=
            visible_pairs(document, config.mask, shard.q[i].first, shard.q[i].num_tokens);
      }
      loads[rank] += share_loads[part];
    }
  }
  return sharding;
}

std::vector<std::int64_t> global_rows(const std::vector<OwnedChunk>& chunks) {
  std::vector<std::int64_t> rows;
  for (const OwnedChunk& chunk : chunks) {
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) rows.push_back(chunk.row_begin + i);
  }
  return rows;
}

}  // namespace cpattn
