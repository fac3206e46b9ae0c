// Schedules are executed on symbols instead of numbers: a state is the run of key chunks it holds.
#include "cp/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cp/ring_layout.h"
#include "tests/support/batches.h"
#include "tests/support/every_way.h"

namespace cpattn::testing {
namespace {

/// Chunks [begin, end) of the keys of one q chunk's document, in one state.
struct Node {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Whether left and right are the two children of one node of the canonical tree over `num_chunks`
/// chunks: left is node (level, 2i), complete; right is what there is of node (level, 2i + 1).
bool are_siblings(const Node& left, const Node& right, std::int64_t num_chunks) {
  const std::int64_t width = left.end - left.begin;
  return width > 0 && std::has_single_bit(static_cast<std::uint64_t>(width)) &&
         left.begin % (2 * width) == 0 && right.begin == left.end &&
         right.end == std::min(left.begin + 2 * width, num_chunks) && right.end > right.begin;
}

/// Executes the schedules of all ranks of one problem and fails for whatever is not right.
class SymbolicRun {
 public:
  SymbolicRun(const SequenceBatch& batch, const CpConfig& config, int world_size)
      : batch_(batch),
        config_(config),
        world_size_(world_size),
        sharding_(make_sharding(batch, config, world_size)),
        num_steps_(num_ring_steps(make_reach(batch, sharding_, config, ring_direction(config)))) {
    for (int rank = 0; rank < world_size; ++rank)
      schedules_.push_back(make_schedule(batch, sharding_, config, rank, num_steps_));
  }

  void check() {
    ASSERT_NO_FATAL_FAILURE(check_peers());
    for (int rank = 0; rank < world_size_; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      ASSERT_NO_FATAL_FAILURE(run_rank(rank));
    }
    ASSERT_EQ(pairs_, expected_pairs());
  }

  const Schedule& schedule(int rank) const { return schedules_[static_cast<std::size_t>(rank)]; }
  const Sharding& sharding() const { return sharding_; }
  /// States that waited between two steps, at most; after check().
  int most_carried(int rank) const { return most_carried_.at(rank); }

 private:
  const Shard& shard(int rank) const { return sharding_.shards[static_cast<std::size_t>(rank)]; }

  void check_peers() const {
    for (int rank = 0; rank < world_size_; ++rank) {
      const Schedule& mine = schedule(rank);
      ASSERT_EQ(mine.steps.size(), static_cast<std::size_t>(num_steps_));
      ASSERT_TRUE(mine.direction == 1 || mine.direction == -1);
      ASSERT_EQ(mine.direction, schedule(0).direction);
      ASSERT_EQ(mine.steps[0].kv_owner, rank);
      std::set<int> owners;
      for (std::size_t t = 0; t < mine.steps.size(); ++t) {
        const Step& step = mine.steps[t];
        owners.insert(step.kv_owner);
        if (t + 1 == mine.steps.size()) {
          ASSERT_EQ(step.send_to, -1);
          ASSERT_EQ(step.receive_from, -1);
          continue;
        }
        // What I send is what my peer expects, and then works on.
        const Step& peer = schedule(step.send_to).steps[t];
        ASSERT_EQ(peer.receive_from, rank);
        ASSERT_EQ(schedule(step.send_to).steps[t + 1].kv_owner, step.kv_owner);
      }
      ASSERT_EQ(owners.size(), static_cast<std::size_t>(num_steps_));
    }
  }

  void run_rank(int rank) {
    rank_ = rank;
    carried_.clear();
    finalized_.assign(shard(rank).q.size(), 0);
    most_carried_[rank] = 0;
    for (const Step& step : schedule(rank).steps) {
      std::set<std::int32_t> seen;
      for (const ChunkProgram& program : step.programs) {
        ASSERT_TRUE(seen.insert(program.q_chunk).second) << "two programs of one q chunk";
        ASSERT_LT(program.op_begin, program.op_end) << "a program without ops";
        ASSERT_NO_FATAL_FAILURE(run_program(step, program));
      }
      most_carried_[rank] = std::max(most_carried_[rank], static_cast<int>(carried_.size()));
    }
    ASSERT_TRUE(carried_.empty()) << "a state was never used";
    for (const int count : finalized_) ASSERT_EQ(count, 1) << "finalized so many times";
  }

  void run_program(const Step& step, const ChunkProgram& program) {
    q_index_ = program.q_chunk;
    scratch_.clear();
    const Schedule& mine = schedule(rank_);
    for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
      const StateOp& op = mine.ops[static_cast<std::size_t>(i)];
      ASSERT_NO_FATAL_FAILURE(run_op(step, op));
    }
    ASSERT_TRUE(scratch_.empty()) << "a scratch state outlives its program";
  }

  void run_op(const Step& step, const StateOp& op) {
    switch (op.kind) {
      case StateOpKind::block:
        ASSERT_NO_FATAL_FAILURE(check_block(step, op));
        ASSERT_EQ(find(op.dst), nullptr) << "slot " << op.dst << " is still in use";
        return put(op.dst, leaf(step, op));
      case StateOpKind::accumulate:
        ASSERT_EQ(config_.schedule, ScheduleKind::arrival);
        ASSERT_NO_FATAL_FAILURE(check_block(step, op));
        ASSERT_NE(find(op.dst), nullptr) << "nothing to accumulate on";
        find(op.dst)->end += 1;  // counts chunks: the order is free
        return;
      case StateOpKind::merge:
        ASSERT_EQ(config_.schedule, ScheduleKind::canonical);
        return merge(op);
      case StateOpKind::finalize:
        return finalize(op);
      case StateOpKind::finalize_empty:
        ASSERT_EQ(num_visible_chunks(), 0);
        ++finalized_[static_cast<std::size_t>(q_index_)];
        return;
    }
  }

  void merge(const StateOp& op) {
    ASSERT_NE(find(op.left), nullptr) << "slot " << op.left << " is empty";
    ASSERT_NE(find(op.right), nullptr) << "slot " << op.right << " is empty";
    const Node left = take(op.left), right = take(op.right);
    ASSERT_TRUE(are_siblings(left, right, num_visible_chunks()))
        << "[" << left.begin << ", " << left.end << ") and [" << right.begin << ", " << right.end
        << ") of " << num_visible_chunks();
    ASSERT_EQ(find(op.dst), nullptr) << "slot " << op.dst << " is still in use";
    put(op.dst, {left.begin, right.end});
  }

  void finalize(const StateOp& op) {
    ASSERT_NE(find(op.left), nullptr) << "slot " << op.left << " is empty";
    const Node whole = take(op.left);
    ASSERT_EQ(whole.end - whole.begin, num_visible_chunks());
    ASSERT_GT(num_visible_chunks(), 0);
    ++finalized_[static_cast<std::size_t>(q_index_)];
  }

  /// The block is of the same document, once, under the right mask, and some pair is visible.
  void check_block(const Step& step, const StateOp& op) {
    const auto& kv = shard(step.kv_owner).kv;
    ASSERT_GE(op.kv_block, 0);
    ASSERT_LT(static_cast<std::size_t>(op.kv_block), kv.size());
    const OwnedChunk& key = kv[static_cast<std::size_t>(op.kv_block)];
    const OwnedChunk& query = q_chunk();
    ASSERT_EQ(key.document, query.document);
    ASSERT_TRUE(blocks_.insert({key.document, query.chunk, key.chunk}).second)
        << "q chunk " << query.chunk << " meets kv chunk " << key.chunk << " twice";
    std::int64_t visible = 0;
    for (std::int64_t row = 0; row < query.num_tokens; ++row) {
      const std::int64_t keys =
          std::clamp<std::int64_t>(visible_keys(query.first + row) - key.first, 0, key.num_tokens);
      ASSERT_EQ(op.mask.visible_keys(row, key.num_tokens), keys);
      visible += keys;
    }
    ASSERT_GT(visible, 0) << "a block without a visible pair";
    pairs_ += visible;
  }

  /// Keys that a query of the current document sees.
  std::int64_t visible_keys(std::int64_t position) const {
    const Document& d = batch_.documents[static_cast<std::size_t>(q_chunk().document)];
    if (config_.mask == MaskKind::full) return d.kv_tokens;
    return std::max<std::int64_t>(0, position + 1 + d.kv_tokens - d.q_tokens);
  }
  std::int64_t num_visible_chunks() const {
    const std::int64_t last = q_chunk().first + q_chunk().num_tokens - 1;
    return (visible_keys(last) + config_.chunk_tokens - 1) / config_.chunk_tokens;
  }
  const OwnedChunk& q_chunk() const { return shard(rank_).q[static_cast<std::size_t>(q_index_)]; }

  Node leaf(const Step& step, const StateOp& op) const {
    const std::int64_t chunk = shard(step.kv_owner).kv[static_cast<std::size_t>(op.kv_block)].chunk;
    return {chunk, chunk + 1};
  }

  std::int64_t expected_pairs() const {
    std::int64_t pairs = 0;
    for (const Document& document : batch_.documents)
      pairs += cpattn::visible_pairs(document, config_.mask, 0, document.q_tokens);
    return pairs;
  }

  // A carried slot holds one q chunk's state; another's must not find it.
  Node* find(SlotIndex slot) {
    if (is_scratch(slot)) {
      EXPECT_LT(scratch_number(slot), schedule(rank_).num_scratch_slots);
      const auto place = scratch_.find(slot);
      return place == scratch_.end() ? nullptr : &place->second;
    }
    EXPECT_LT(slot, schedule(rank_).num_carried_slots);
    const auto place = carried_.find(slot);
    if (place == carried_.end()) return nullptr;
    EXPECT_EQ(place->second.first, q_index_) << "slot " << slot << " belongs to another q chunk";
    return &place->second.second;
  }
  void put(SlotIndex slot, const Node& node) {
    if (is_scratch(slot)) {
      scratch_[slot] = node;
    } else {
      carried_[slot] = {q_index_, node};
    }
  }
  Node take(SlotIndex slot) {
    const Node node = *find(slot);
    if (is_scratch(slot)) {
      scratch_.erase(slot);
    } else {
      carried_.erase(slot);
    }
    return node;
  }

  const SequenceBatch& batch_;
  CpConfig config_;
  int world_size_;
  Sharding sharding_;
  int num_steps_;
  std::vector<Schedule> schedules_;

  int rank_ = 0;
  std::int32_t q_index_ = 0;
  std::map<SlotIndex, std::pair<std::int32_t, Node>> carried_;
  std::map<SlotIndex, Node> scratch_;
  std::vector<int> finalized_;
  std::map<int, int> most_carried_;
  std::set<std::tuple<std::int32_t, std::int64_t, std::int64_t>> blocks_;
  std::int64_t pairs_ = 0;
};

const std::vector<ShardingKind> kShardings{ShardingKind::contiguous, ShardingKind::zigzag};

TEST(Schedule, SmallPacksAreComputedOnceAndMergedAlongTheTree) {
  for (const NamedBatch& named : small_batches()) {
    SCOPED_TRACE(named.name);
    for_each_way(kShardings, {3, 16}, {1, 2, 3, 4, 7, 8},
                 [&](const CpConfig& config, int world_size) {
                   SymbolicRun(named.batch, config, world_size).check();
                 });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Schedule, LongDocumentsOfOddChunkCounts) {
  for (const std::int64_t chunks : {31, 64, 97})
    for_each_way(kShardings, {1}, {1, 3, 4, 8}, [&](const CpConfig& config, int world_size) {
      const SequenceBatch batch = batch_of_one(chunks, chunks);
      SymbolicRun(batch, config, world_size).check();
    });
}

TEST(Schedule, RandomPacks) {
  for (std::uint64_t seed = 0; seed < 3; ++seed)
    for_each_way(kShardings, {8}, {2, 5}, [&](const CpConfig& config, int world_size) {
      const SequenceBatch batch = random_pack(seed, 20, 70);
      SymbolicRun(batch, config, world_size).check();
    });
}

TEST(Schedule, PendingStatesGrowWithTheLogarithmOfTheChunks) {
  // What a ring has brought is one run of neighbouring chunks (contiguous), or two (zigzag), and a
  // run of n chunks is at most 2 log2(n) nodes of the tree. Within a step a slot that was freed is
  // not used again, so slots are at most those before the step plus those after it.
  for (const ShardingKind sharding : {ShardingKind::contiguous, ShardingKind::zigzag})
    for (const std::int64_t chunks : {16, 64, 100, 128})
      for (const int world_size : {2, 3, 4, 8}) {
        CpConfig config;
        config.chunk_tokens = 1;
        config.mask = MaskKind::full;
        config.sharding = sharding;
        const SequenceBatch batch = batch_of_one(chunks, chunks);
        SymbolicRun run(batch, config, world_size);
        ASSERT_NO_FATAL_FAILURE(run.check());
        const double runs = sharding == ShardingKind::contiguous ? 1 : 2;
        const double log2_chunks = std::log2(static_cast<double>(chunks));
        for (int rank = 0; rank < world_size; ++rank) {
          const auto place = static_cast<std::size_t>(rank);
          const auto own = static_cast<double>(run.sharding().shards[place].q.size());
          EXPECT_LE(static_cast<double>(run.most_carried(rank)), own * runs * 2 * log2_chunks);
          EXPECT_LE(run.schedule(rank).num_carried_slots, 2 * run.most_carried(rank));
          EXPECT_LE(run.schedule(rank).num_scratch_slots, 2 * log2_chunks + 2);
        }
      }
}

TEST(Schedule, ASingleRankCarriesNothing) {
  CpConfig config;
  config.chunk_tokens = 4;
  const SequenceBatch batch = batch_of_one(200, 200);
  const Sharding sharding = make_sharding(batch, config, 1);

  const Schedule schedule = make_schedule(batch, sharding, config, 0, 1);

  EXPECT_EQ(schedule.num_carried_slots, 0);
  EXPECT_EQ(schedule.steps.size(), 1u);
}

TEST(Schedule, TheCheckItselfCanFail) {
  EXPECT_TRUE(are_siblings({0, 1}, {1, 2}, 2));
  EXPECT_TRUE(are_siblings({0, 4}, {4, 5}, 5));
  EXPECT_TRUE(are_siblings({4, 6}, {6, 7}, 7));
  EXPECT_FALSE(are_siblings({1, 2}, {2, 3}, 4));  // cousins
  EXPECT_FALSE(are_siblings({1, 2}, {0, 1}, 4));  // swapped
  EXPECT_FALSE(are_siblings({0, 4}, {4, 6}, 7));  // right one incomplete
  EXPECT_FALSE(are_siblings({0, 2}, {4, 6}, 8));  // a gap
}

}  // namespace
}  // namespace cpattn::testing
