#include "cp/sharding.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "cp/zigzag.h"
#include "src/base/digest.h"
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

/// The cuts of zigzag.h, for the queries of a document. A row costs something even if it sees
/// nothing.
std::vector<Share> zigzag_shares(const Document& document, const ChunkGrid& grid, int parts,
                                 MaskKind mask) {
  std::vector<std::int64_t> work_before{0};
  for (std::int64_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
    const std::int64_t first = grid.begin(chunk), count = grid.end(chunk) - first;
    work_before.push_back(work_before.back() + visible_pairs(document, mask, first, count) + count);
  }
  std::vector<Share> shares;
  Run left{0, grid.num_chunks()};
  for (const RunPair& pair : zigzag_pairs(work_before, parts)) {
    const Run rest{left.begin + pair.front, left.end - pair.back};
    shares.push_back({Run{left.begin, rest.begin}, Run{rest.end, left.end}});
    left = rest;
  }
  return shares;
}

/// Parts p and 2P-1-p.
std::vector<Share> dual_chunk_shares(const ChunkGrid& grid, int parts) {
  if (parts == 1) return {Share{Run{0, grid.num_chunks()}, Run{}}};
  const std::int64_t length = grid.chunks_per_part();
  std::vector<Share> shares;
  for (std::int64_t p = 0; p < parts; ++p) {
    const std::int64_t mirror = 2 * parts - 1 - p;
    shares.push_back(
        {Run{p * length, (p + 1) * length}, Run{mirror * length, (mirror + 1) * length}});
  }
  return shares;
}

std::vector<Share> shares_of(const Document& document, int parts, const CpConfig& config) {
  const ChunkGrid grid = chunk_grid(document.q_tokens, config, parts);
  switch (config.sharding) {
    case ShardingKind::contiguous:
      return contiguous_shares(grid.num_chunks(), parts);
    case ShardingKind::zigzag:
      return zigzag_shares(document, grid, parts, config.mask);
    case ShardingKind::dual_chunk:
      return dual_chunk_shares(grid, parts);
  }
  return {};
}

/// How the queries and the keys of a document are cut.
struct Cuts {
  std::vector<Share> q;
  std::vector<Share> kv;
};

/// Cuts every pair of lengths once: packs repeat them. Keys are cut as if they were the queries, so
/// both fall together when there are as many.
class Cutter {
 public:
  Cutter(int parts, const CpConfig& config) : parts_(parts), config_(config) {}

  const Cuts& cuts_of(const Document& document) {
    const auto [place, is_new] =
        known_.try_emplace({document.q_tokens, document.kv_tokens}, Cuts{});
    if (is_new) {
      const Document keys{0, document.kv_tokens, 0, document.kv_tokens};
      place->second = {shares_of(document, parts_, config_), shares_of(keys, parts_, config_)};
    }
    return place->second;
  }

 private:
  int parts_;
  const CpConfig& config_;
  std::map<std::pair<std::int64_t, std::int64_t>, Cuts> known_;
};

/// Cost of a share for the choice of the shift: its visible pairs, plus its tokens so that rows
/// which see little still count.
std::int64_t share_load(const Document& document, const ChunkGrid& grid, const Share& share,
                        MaskKind mask) {
  std::int64_t load = 0;
  for (const Run& run : share) {
    const std::int64_t first = grid.begin(run.begin), count = grid.begin(run.end) - first;
    load += visible_pairs(document, mask, first, count) + count;
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
void deal(std::int32_t document, const ChunkGrid& grid, const Share& share, std::int64_t row_begin,
          std::vector<OwnedChunk>& chunks, std::int64_t& rows) {
  for (const Run& run : share) {
    for (std::int64_t chunk = run.begin; chunk < run.end; ++chunk) {
      const std::int64_t first = grid.begin(chunk), count = grid.end(chunk) - first;
      chunks.push_back({document, chunk, first, count, row_begin + first, rows});
      rows += count;
    }
  }
}

}  // namespace

std::int64_t ChunkGrid::chunks_per_part() const { return ceil_div(part_tokens, chunk_tokens); }

std::int64_t ChunkGrid::num_chunks() const {
  return tokens == 0 ? 0 : tokens / part_tokens * chunks_per_part();
}

std::int64_t ChunkGrid::begin(std::int64_t chunk) const {
  if (chunk >= num_chunks()) return tokens;
  return chunk / chunks_per_part() * part_tokens + chunk % chunks_per_part() * chunk_tokens;
}

std::int64_t ChunkGrid::end(std::int64_t chunk) const { return begin(chunk + 1); }

std::int64_t ChunkGrid::chunk_at(std::int64_t token) const {
  return token / part_tokens * chunks_per_part() + token % part_tokens / chunk_tokens;
}

ChunkGrid chunk_grid(std::int64_t tokens, const CpConfig& config, int world_size) {
  const bool has_parts = config.sharding == ShardingKind::dual_chunk && world_size > 1;
  return {tokens, config.chunk_tokens, has_parts ? tokens / (2 * world_size) : tokens};
}

void check_divisible(const SequenceBatch& batch, const CpConfig& config, int world_size) {
  if (config.sharding != ShardingKind::dual_chunk || world_size == 1) return;
  constexpr int kMaxNamed = 8;
  const std::int64_t parts = 2 * std::int64_t{world_size};
  std::string text;
  int num_refused = 0;
  for (std::size_t d = 0; d < batch.documents.size(); ++d) {
    const Document& document = batch.documents[d];
    if (document.q_tokens % parts == 0 && document.kv_tokens % parts == 0) continue;
    if (++num_refused > kMaxNamed) continue;
    text += detail::concat(text.empty() ? "" : "; ", "document ", d, ": ", document.q_tokens,
                           " query and ", document.kv_tokens, " key tokens");
  }
  if (num_refused > kMaxNamed) text += detail::concat("; and ", num_refused - kMaxNamed, " more");
  require(text.empty(), "sharding dual_chunk: ", text, "; expected multiples of 2 * ", world_size,
          " ranks = ", parts);
}

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
  check_divisible(batch, config, world_size);
  Sharding sharding;
  sharding.shards.resize(static_cast<std::size_t>(world_size));
  std::vector<std::int64_t> loads(static_cast<std::size_t>(world_size), 0);
  Cutter cutter(world_size, config);
  for (std::size_t d = 0; d < batch.documents.size(); ++d) {
    const Document& document = batch.documents[d];
    const auto& [q_shares, kv_shares] = cutter.cuts_of(document);
    const ChunkGrid q_grid = chunk_grid(document.q_tokens, config, world_size);
    const ChunkGrid kv_grid = chunk_grid(document.kv_tokens, config, world_size);
    std::vector<std::int64_t> share_loads;
    for (const Share& share : q_shares)
      share_loads.push_back(share_load(document, q_grid, share, config.mask));
    const bool may_shift = config.sharding != ShardingKind::dual_chunk;
    const int shift = may_shift ? best_shift(loads, share_loads) : 0;
    for (int p = 0; p < world_size; ++p) {
      const auto part = static_cast<std::size_t>(p);
      const auto rank = static_cast<std::size_t>((p + shift) % world_size);
      Shard& shard = sharding.shards[rank];
      const auto id = narrow<std::int32_t>(d);
      const std::size_t first_new = shard.q.size();
      deal(id, q_grid, q_shares[part], document.q_begin, shard.q, shard.q_rows);
      deal(id, kv_grid, kv_shares[part], document.kv_begin, shard.kv, shard.kv_rows);
      for (std::size_t i = first_new; i < shard.q.size(); ++i) {
        shard.visible_pairs +=
            visible_pairs(document, config.mask, shard.q[i].first, shard.q[i].num_tokens);
      }
      loads[rank] += share_loads[part];
    }
  }
  return sharding;
}

std::uint64_t digest_of(const Sharding& sharding) {
  Digest digest;
  for (const Shard& shard : sharding.shards) {
    for (const auto* chunks : {&shard.q, &shard.kv}) {
      digest.add(static_cast<std::int64_t>(chunks->size()));
      for (const OwnedChunk& chunk : *chunks) {
        digest.add(chunk.document);
        digest.add(chunk.chunk);
        digest.add(chunk.num_tokens);
        digest.add(chunk.row_begin);
      }
    }
  }
  return digest.value();
}

std::vector<std::int64_t> global_rows(const std::vector<OwnedChunk>& chunks) {
  std::vector<std::int64_t> rows;
  for (const OwnedChunk& chunk : chunks) {
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) rows.push_back(chunk.row_begin + i);
  }
  return rows;
}

}  // namespace cpattn
