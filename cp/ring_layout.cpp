#include "cp/ring_layout.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "cp/visibility.h"

namespace cpattn {
namespace {

/// A rank that sees the first `prefix` kv chunks of a document.
struct Reader {
  std::int32_t document;
  std::int64_t prefix;
  int rank;
};

/// A kv chunk, and where it is in its owner's shard.
struct OwnersChunk {
  std::int32_t document;
  std::int64_t chunk;
  int owner;
  std::size_t index;
};

/// By document; those who see most come first.
std::vector<Reader> find_readers(const SequenceBatch& batch, const Sharding& sharding,
                                 const CpConfig& config) {
  const int world_size = static_cast<int>(sharding.shards.size());
  std::vector<Reader> readers;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<OwnedChunk>& own = sharding.shards[static_cast<std::size_t>(rank)].q;
    for (std::size_t i = 0; i < own.size(); ++i) {
      // Later chunks see no less.
      if (i + 1 < own.size() && own[i + 1].document == own[i].document) continue;
      const Document& document = batch.documents[static_cast<std::size_t>(own[i].document)];
      const ChunkGrid grid = chunk_grid(document.kv_tokens, config, world_size);
      const auto prefix = num_visible_kv_chunks(document, own[i], config.mask, grid);
      readers.push_back({own[i].document, prefix, rank});
    }
  }
  std::sort(readers.begin(), readers.end(), [](const Reader& a, const Reader& b) {
    return std::tie(a.document, b.prefix) < std::tie(b.document, a.prefix);
  });
  return readers;
}

/// By document, from the last chunk, which fewest see, to the first.
std::vector<OwnersChunk> find_chunks(const Sharding& sharding) {
  std::vector<OwnersChunk> chunks;
  for (std::size_t owner = 0; owner < sharding.shards.size(); ++owner) {
    const std::vector<OwnedChunk>& own = sharding.shards[owner].kv;
    for (std::size_t i = 0; i < own.size(); ++i)
      chunks.push_back({own[i].document, own[i].chunk, static_cast<int>(owner), i});
  }
  std::sort(chunks.begin(), chunks.end(), [](const OwnersChunk& a, const OwnersChunk& b) {
    return std::tie(a.document, b.chunk) < std::tie(b.document, a.chunk);
  });
  return chunks;
}

/// Hops from the owner to the last of `ranks` on the way round the ring: the one closest to the
/// owner from behind.
int hops_to_last(const std::set<int>& ranks, int owner, int direction, int world_size) {
  if (ranks.empty()) return 0;
  int last = 0;
  if (direction > 0) {
    const auto at = ranks.lower_bound(owner);
    last = at == ranks.begin() ? *ranks.rbegin() : *std::prev(at);
  } else {
    const auto at = ranks.upper_bound(owner);
    last = at == ranks.end() ? *ranks.begin() : *at;
  }
  return ((last - owner) * direction + world_size) % world_size;
}

}  // namespace

Reach make_reach(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config,
                 int direction) {
  const int world_size = static_cast<int>(sharding.shards.size());
  Reach reach;
  for (const Shard& shard : sharding.shards) reach.emplace_back(shard.kv.size(), 0);
  const std::vector<Reader> readers = find_readers(batch, sharding, config);
  std::set<int> ranks;  // that see the chunk at hand
  auto reader = readers.begin();
  std::int32_t document = -1;
  for (const OwnersChunk& chunk : find_chunks(sharding)) {
    if (chunk.document != document) ranks.clear();
    document = chunk.document;
    while (reader != readers.end() && reader->document < document) ++reader;
    for (; reader != readers.end() && reader->document == document && reader->prefix > chunk.chunk;
         ++reader) {
      ranks.insert(reader->rank);
    }
    reach[static_cast<std::size_t>(chunk.owner)][chunk.index] =
        hops_to_last(ranks, chunk.owner, direction, world_size);
  }
  return reach;
}

int num_ring_steps(const Reach& reach) {
  std::int32_t longest = 0;
  for (const std::vector<std::int32_t>& of_owner : reach)
    for (const std::int32_t hops : of_owner) longest = std::max(longest, hops);
  return longest + 1;
}

RingLayout::RingLayout(const Sharding& sharding, const Reach& reach, int rank, int direction,
                       const std::function<std::size_t(std::int64_t num_keys)>& packed_bytes) {
  const int world_size = static_cast<int>(sharding.shards.size());
  const auto num_steps = static_cast<std::size_t>(num_ring_steps(reach));
  bytes_.held.resize(num_steps);
  bytes_.passed_on.resize(num_steps);
  for (std::size_t owner = 0; owner < sharding.shards.size(); ++owner) {
    const std::vector<OwnedChunk>& chunks = sharding.shards[owner].kv;
    const std::vector<std::int32_t>& hops = reach[owner];
    const int step = ((rank - static_cast<int>(owner)) * direction + world_size) % world_size;
    std::vector<std::size_t> order(chunks.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return hops[a] > hops[b]; });
    std::vector<PlacedChunk> placed(chunks.size());
    std::size_t end = 0;
    for (const std::size_t i : order) {
      placed[i] = {end, chunks[i].num_tokens, hops[i]};
      end += packed_bytes(chunks[i].num_tokens);
      if (hops[i] >= step) bytes_.held[static_cast<std::size_t>(step)] = end;
      if (hops[i] > step) bytes_.passed_on[static_cast<std::size_t>(step)] = end;
    }
    chunks_.push_back(std::move(placed));
    span_bytes_.push_back(end);
  }
}

std::vector<std::size_t> RingLayout::offsets(int owner) const {
  std::vector<std::size_t> offsets;
  for (const PlacedChunk& chunk : chunks(owner)) offsets.push_back(chunk.offset);
  return offsets;
}

std::size_t RingLayout::bytes_sent() const {
  return std::accumulate(bytes_.passed_on.begin(), bytes_.passed_on.end(), std::size_t{0});
}

void RingLayout::bind(int owner, std::size_t step, const std::byte* span,
                      std::vector<KvBlock>& blocks) const {
  blocks.clear();
  for (const PlacedChunk& chunk : chunks(owner)) {
    const bool is_here = static_cast<std::size_t>(chunk.reach) >= step;
    blocks.push_back(is_here ? KvBlock{span + chunk.offset, chunk.num_keys} : KvBlock{});
  }
}

}  // namespace cpattn
