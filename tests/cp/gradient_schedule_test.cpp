// Schedules of all ranks are executed on symbols instead of numbers: a partial sum is the text of
// the expression that made it.
#include "cp/gradient_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cp/ring_layout.h"
#include "cp/schedule.h"
#include "cp/visibility.h"
#include "tests/support/batches.h"
#include "tests/support/every_way.h"

namespace cpattn::testing {
namespace {

using Text = std::string;

/// The canonical tree over leaves [first, end) below the node that covers [begin, begin + width),
/// from its definition.
Text defined(std::int64_t begin, std::int64_t width, std::int64_t first, std::int64_t end) {
  if (begin >= end || begin + width <= first) return "";
  if (width == 1) return std::to_string(begin);
  const Text left = defined(begin, width / 2, first, end);
  const Text right = defined(begin + width / 2, width / 2, first, end);
  return left.empty() ? right : right.empty() ? left : "(" + left + " " + right + ")";
}
Text defined(std::int64_t first, std::int64_t end) {
  std::int64_t width = 1;
  while (width < end) width *= 2;
  return defined(0, width, first, end);
}

/// The numbers in a text, sorted: what an order-free sum is judged by.
std::vector<std::int64_t> leaves_of(const Text& text) {
  std::vector<std::int64_t> leaves;
  for (std::size_t i = 0; i < text.size();) {
    if (std::isdigit(static_cast<unsigned char>(text[i])) == 0) {
      ++i;
      continue;
    }
    std::size_t length = 0;
    leaves.push_back(std::stoll(text.substr(i), &length));
    i += length;
  }
  std::sort(leaves.begin(), leaves.end());
  return leaves;
}

/// Slots that hold expressions; whatever is read is gone, whatever is written was empty.
class Slots {
 public:
  void put(SlotIndex slot, const Text& value) {
    ASSERT_TRUE(values_.emplace(slot, value).second) << "slot " << slot << " is still in use";
  }
  Text take(SlotIndex slot) {
    const auto place = values_.find(slot);
    if (place == values_.end()) {
      ADD_FAILURE() << "slot " << slot << " is empty";
      return "?";
    }
    Text value = place->second;
    values_.erase(place);
    return value;
  }
  /// dst = left + right, where dst is left or right.
  void sum(const SumOp& op) {
    ASSERT_TRUE(op.dst == op.left || op.dst == op.right);
    ASSERT_NE(op.left, op.right);
    const Text left = take(op.left), right = take(op.right);
    put(op.dst, "(" + left + " " + right + ")");
  }
  bool is_empty() const { return values_.empty(); }
  bool holds(SlotIndex slot) const { return values_.count(slot) > 0; }
  std::size_t size() const { return values_.size(); }

 private:
  std::map<SlotIndex, Text> values_;
};

struct RankState {
  GradientSchedule schedule;
  Slots dq;
  std::vector<Slots> carried;                                   ///< by own kv chunk
  std::vector<int> finished_q, finished_kv;                     ///< results so far
  std::vector<std::map<std::int32_t, std::vector<Text>>> sent;  ///< by step: pieces by kv chunk
};

/// Executes the schedules of all ranks of one problem and fails for whatever is not right.
class SymbolicRun {
 public:
  SymbolicRun(const SequenceBatch& batch, const CpConfig& config, int world_size)
      : batch_(batch),
        config_(config),
        world_size_(world_size),
        sharding_(make_sharding(batch, config, world_size)),
        num_steps_(num_ring_steps(make_reach(batch, sharding_, config, ring_direction(config)))) {
    for (int rank = 0; rank < world_size; ++rank) {
      RankState state;
      state.schedule = make_gradient_schedule(batch, sharding_, config, rank, num_steps_);
      state.carried.resize(shard(rank).kv.size());
      state.finished_q.assign(shard(rank).q.size(), 0);
      state.finished_kv.assign(shard(rank).kv.size(), 0);
      state.sent.resize(static_cast<std::size_t>(world_size));
      ranks_.push_back(std::move(state));
    }
  }

  void check() {
    for (int t = 0; t < num_steps_; ++t) {
      SCOPED_TRACE("step " + std::to_string(t));
      for (int rank = 0; rank < world_size_; ++rank) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        ASSERT_NO_FATAL_FAILURE(check_peers(rank, t));
        ASSERT_NO_FATAL_FAILURE(run_tasks(rank, t));
      }
      for (int rank = 0; rank < world_size_; ++rank) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        ASSERT_NO_FATAL_FAILURE(run_folds(rank, t));
      }
    }
    for (int rank = 0; rank < world_size_; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      ASSERT_NO_FATAL_FAILURE(check_end(rank));
    }
    ASSERT_EQ(pairs_, expected_pairs());
  }

  const Sharding& sharding() const { return sharding_; }
  const GradientSchedule& schedule(int rank) const {
    return ranks_[static_cast<std::size_t>(rank)].schedule;
  }

 private:
  const Shard& shard(int rank) const { return sharding_.shards[static_cast<std::size_t>(rank)]; }
  RankState& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Document& document_of(const OwnedChunk& chunk) const {
    return batch_.documents[static_cast<std::size_t>(chunk.document)];
  }
  bool is_arrival() const { return config_.schedule == ScheduleKind::arrival; }
  const GradientStep& step_of(int rank, int t) const {
    return schedule(rank).steps[static_cast<std::size_t>(t)];
  }

  void check_peers(int rank, int t) {
    ASSERT_EQ(schedule(rank).steps.size(), static_cast<std::size_t>(num_steps_));
    const GradientStep& step = step_of(rank, t);
    const Schedule forward = make_schedule(batch_, sharding_, config_, rank, num_steps_);
    ASSERT_EQ(step.kv_owner, forward.steps[static_cast<std::size_t>(t)].kv_owner);
    ASSERT_EQ(step.kv.size(), shard(step.kv_owner).kv.size());
    if (t == 0) {
      ASSERT_EQ(step.pieces_from, -1);
      ASSERT_TRUE(step.arriving.empty());
      return;
    }
    ASSERT_EQ(step_of(step.pieces_from, t).kv_owner, rank) << "what comes is not what is sent";
  }

  void run_tasks(int rank, int t) {
    const GradientStep& step = step_of(rank, t);
    Slots places;
    std::map<SlotIndex, std::int32_t> users;  // of dq slots: tasks of others may run at once
    std::map<std::int32_t, std::int64_t> last_q, last_kv;
    std::int64_t last_wave = -1;
    for (std::int64_t i = step.task_begin; i < step.task_end; ++i) {
      const ScheduledTask& item = schedule(rank).tasks[static_cast<std::size_t>(i)];
      ASSERT_NO_FATAL_FAILURE(check_pair(rank, step, item.task));
      const std::int64_t q = item.task.q_chunk, kv = item.task.kv_block;
      const auto is_later = [](auto& last, std::int32_t key, std::int64_t value) {
        const auto [place, is_new] = last.try_emplace(key, value);
        const bool result = is_new || place->second < value;
        place->second = value;
        return result;
      };
      ASSERT_TRUE(is_later(last_q, item.task.kv_block, q)) << "q chunks do not ascend";
      if (config_.shuffle_arrival == 0) {
        ASSERT_TRUE(is_later(last_kv, item.task.q_chunk, kv)) << "kv chunks do not ascend";
        ASSERT_GE(q + kv, last_wave);
        last_wave = q + kv;
      }
      ASSERT_NO_FATAL_FAILURE(run_dq(rank, step, item, users));
      ASSERT_NO_FATAL_FAILURE(run_dkv(rank, step, item, places));
    }
    ASSERT_NO_FATAL_FAILURE(collect(rank, t, places));
  }

  void check_pair(int rank, const GradientStep& step, const GradientTask& task) {
    const auto& q_chunks = shard(rank).q;
    const auto& kv_chunks = shard(step.kv_owner).kv;
    ASSERT_TRUE(task.q_chunk >= 0 && static_cast<std::size_t>(task.q_chunk) < q_chunks.size());
    ASSERT_TRUE(task.kv_block >= 0 && static_cast<std::size_t>(task.kv_block) < kv_chunks.size());
    const OwnedChunk& q = q_chunks[static_cast<std::size_t>(task.q_chunk)];
    const OwnedChunk& kv = kv_chunks[static_cast<std::size_t>(task.kv_block)];
    ASSERT_EQ(q.document, kv.document);
    ASSERT_TRUE(met_.insert({q.document, q.chunk, kv.chunk}).second) << "met twice";
    std::int64_t visible = 0;
    for (std::int64_t row = 0; row < q.num_tokens; ++row) {
      const std::int64_t keys = std::clamp<std::int64_t>(
          visible_keys(document_of(q), q.first + row) - kv.first, 0, kv.num_tokens);
      ASSERT_EQ(task.mask.visible_keys(row, kv.num_tokens), keys);
      visible += keys;
    }
    ASSERT_GT(visible, 0) << "a task without a visible pair";
    pairs_ += visible;
  }

  std::int64_t visible_keys(const Document& d, std::int64_t position) const {
    if (config_.mask == MaskKind::full) return d.kv_tokens;
    return std::max<std::int64_t>(0, position + 1 + d.kv_tokens - d.q_tokens);
  }

  void run_dq(int rank, const GradientStep& step, const ScheduledTask& item,
              std::map<SlotIndex, std::int32_t>& users) {
    const GradientTask& task = item.task;
    Slots& dq = state(rank).dq;
    const auto use = [&](SlotIndex slot) {
      if (is_scratch(slot)) {
        EXPECT_EQ(slot, scratch_slot(0));
        return;
      }
      EXPECT_LT(slot, schedule(rank).num_dq_slots);
      EXPECT_EQ(users.emplace(slot, task.q_chunk).first->second, task.q_chunk)
          << "slot " << slot << " serves two q chunks in one step";
    };
    const auto& kv = shard(step.kv_owner).kv[static_cast<std::size_t>(task.kv_block)];
    const Text leaf = std::to_string(kv.chunk);
    use(task.dq);
    ASSERT_TRUE(!task.continues_dq || is_arrival());
    dq.put(task.dq, task.continues_dq ? dq.take(task.dq) + " " + leaf : leaf);
    for (std::int64_t i = item.dq_sum_begin; i < item.dq_sum_end; ++i) {
      const SumOp& sum = schedule(rank).sums[static_cast<std::size_t>(i)];
      for (const SlotIndex slot : {sum.dst, sum.left, sum.right}) use(slot);
      dq.sum(sum);
    }
    if (task.dq_result != kNoSlot) {
      use(task.dq_result);
      const auto q = static_cast<std::size_t>(task.q_chunk);
      expect_sum(dq.take(task.dq_result), 0, num_visible(rank, q));
      ++state(rank).finished_q[q];
    }
    ASSERT_FALSE(dq.holds(scratch_slot(0))) << "scratch outlives its task";
  }

  void run_dkv(int rank, const GradientStep& step, const ScheduledTask& item, Slots& places) {
    const GradientTask& task = item.task;
    const KvPlaces& range = step.kv[static_cast<std::size_t>(task.kv_block)];
    const auto use = [&](SlotIndex slot) {
      if (slot == scratch_slot(0)) return;
      EXPECT_GE(slot, range.first_place);
      EXPECT_LT(slot, range.first_place + range.num_places);
      EXPECT_LT(slot, step.num_places);
    };
    const Text leaf = std::to_string(shard(rank).q[static_cast<std::size_t>(task.q_chunk)].chunk);
    use(task.dkv);
    ASSERT_TRUE(!task.continues_dkv || is_arrival());
    places.put(task.dkv, task.continues_dkv ? places.take(task.dkv) + " " + leaf : leaf);
    for (std::int64_t i = item.dkv_sum_begin; i < item.dkv_sum_end; ++i) {
      const SumOp& sum = schedule(rank).sums[static_cast<std::size_t>(i)];
      for (const SlotIndex slot : {sum.dst, sum.left, sum.right}) use(slot);
      places.sum(sum);
    }
    ASSERT_FALSE(places.holds(scratch_slot(0))) << "scratch outlives its task";
  }

  /// What is left in the places of a step is the message, or, of the own shard, carried on.
  void collect(int rank, int t, Slots& places) {
    const GradientStep& step = step_of(rank, t);
    for (std::size_t j = 0; j < step.kv.size(); ++j)
      for (std::int32_t k = 0; k < step.kv[j].num_pieces; ++k) {
        ASSERT_LT(k, step.kv[j].num_places);
        const Text piece = places.take(step.kv[j].first_place + k);
        if (t == 0) {
          ASSERT_LT(k, schedule(rank).carried_dkv[j]);
          state(rank).carried[j].put(k, piece);
        } else {
          state(rank).sent[static_cast<std::size_t>(t)][static_cast<std::int32_t>(j)].push_back(
              piece);
        }
      }
    ASSERT_TRUE(places.is_empty()) << "a place beyond the pieces is left in use";
  }

  void run_folds(int rank, int t) {
    RankState& mine = state(rank);
    const GradientStep& step = step_of(rank, t);
    const std::size_t num_chunks = shard(rank).kv.size();
    if (t > 0) {
      ASSERT_EQ(step.arriving.size(), num_chunks);
      auto& sent = state(step.pieces_from).sent[static_cast<std::size_t>(t)];
      for (std::size_t j = 0; j < num_chunks; ++j) {
        const std::vector<Text>& pieces = sent[static_cast<std::int32_t>(j)];
        ASSERT_EQ(pieces.size(), static_cast<std::size_t>(step.arriving[j]));
        for (std::size_t k = 0; k < pieces.size(); ++k)
          mine.carried[j].put(scratch_slot(static_cast<int>(k)), pieces[k]);
      }
    }
    for (std::int64_t i = step.fold_begin; i < step.fold_end; ++i)
      ASSERT_NO_FATAL_FAILURE(run_fold(rank, mine.schedule.folds[static_cast<std::size_t>(i)]));
    for (std::size_t j = 0; j < num_chunks; ++j)
      for (int k = 0; t > 0 && k < step.arriving[j]; ++k)
        ASSERT_FALSE(mine.carried[j].holds(scratch_slot(k))) << "a piece was not used";
  }

  void run_fold(int rank, const FoldOp& op) {
    const auto j = static_cast<std::size_t>(op.kv_chunk);
    Slots& slots = state(rank).carried[j];
    const auto expect_carried = [&](SlotIndex slot) {
      EXPECT_GE(slot, 0);
      EXPECT_LT(slot, schedule(rank).carried_dkv[j]);
    };
    switch (op.kind) {
      case DkvOpKind::sum:
        expect_carried(op.dst);
        return slots.sum({op.dst, op.left, op.right});
      case DkvOpKind::copy:
        expect_carried(op.dst);
        return slots.put(op.dst, slots.take(op.left));
      case DkvOpKind::finish: {
        const auto [first, end] = seeing(rank, j);
        expect_sum(slots.take(op.left), first, end);
        ++state(rank).finished_kv[j];
        return;
      }
      case DkvOpKind::finish_empty: {
        const auto [first, end] = seeing(rank, j);
        EXPECT_EQ(first, end);
        ++state(rank).finished_kv[j];
        return;
      }
    }
  }

  void expect_sum(const Text& text, std::int64_t first, std::int64_t end) const {
    if (is_arrival()) {
      EXPECT_EQ(leaves_of(text), leaves_of(defined(first, end)));
    } else {
      EXPECT_EQ(text, defined(first, end));
    }
  }

  /// By the mask alone: chunks of which some row sees something.
  std::int64_t num_visible(int rank, std::size_t q) const {
    const OwnedChunk& chunk = shard(rank).q[q];
    const Document& d = document_of(chunk);
    const ChunkGrid grid = chunk_grid(d.kv_tokens, config_, world_size_);
    std::int64_t count = 0;
    while (count < grid.num_chunks() &&
           grid.begin(count) < visible_keys(d, chunk.first + chunk.num_tokens - 1))
      ++count;
    return count;
  }
  std::pair<std::int64_t, std::int64_t> seeing(int rank, std::size_t kv) const {
    const OwnedChunk& chunk = shard(rank).kv[kv];
    const Document& d = document_of(chunk);
    const ChunkGrid grid = chunk_grid(d.q_tokens, config_, world_size_);
    std::int64_t first = 0;
    while (first < grid.num_chunks() && visible_keys(d, grid.end(first) - 1) <= chunk.first)
      ++first;
    return {first, grid.num_chunks()};
  }

  void check_end(int rank) {
    const RankState& mine = state(rank);
    EXPECT_TRUE(mine.dq.is_empty()) << "a partial dq was never used";
    for (const Slots& slots : mine.carried) EXPECT_TRUE(slots.is_empty());
    for (const int count : mine.finished_kv) EXPECT_EQ(count, 1);
    const std::set<std::int32_t> unseeing(mine.schedule.unseeing_q.begin(),
                                          mine.schedule.unseeing_q.end());
    for (std::size_t q = 0; q < mine.finished_q.size(); ++q) {
      const bool sees_nothing = unseeing.count(static_cast<std::int32_t>(q)) > 0;
      EXPECT_EQ(mine.finished_q[q], sees_nothing ? 0 : 1);
      EXPECT_EQ(sees_nothing, num_visible(rank, q) == 0);
    }
  }

  std::int64_t expected_pairs() const {
    std::int64_t pairs = 0;
    for (const Document& document : batch_.documents)
      pairs += cpattn::visible_pairs(document, config_.mask, 0, document.q_tokens);
    return pairs;
  }

  const SequenceBatch& batch_;
  CpConfig config_;
  int world_size_;
  Sharding sharding_;
  int num_steps_;
  std::vector<RankState> ranks_;
  std::set<std::tuple<std::int32_t, std::int64_t, std::int64_t>> met_;
  std::int64_t pairs_ = 0;
};

void run_all(const SequenceBatch& batch, const std::vector<ShardingKind>& shardings,
             const std::vector<std::int64_t>& chunk_sizes, const std::vector<int>& world_sizes) {
  for_each_way(shardings, chunk_sizes, world_sizes, [&](const CpConfig& config, int world_size) {
    SymbolicRun(batch, config, world_size).check();
  });
}

constexpr auto kContiguous = ShardingKind::contiguous;
constexpr auto kZigzag = ShardingKind::zigzag;
constexpr auto kDualChunk = ShardingKind::dual_chunk;

TEST(GradientSchedule, SmallPacksAreSummedAlongTheTrees) {
  for (const NamedBatch& named : small_batches()) {
    SCOPED_TRACE(named.name);
    run_all(named.batch, {kContiguous, kZigzag}, {3, 16}, {1, 2, 3, 4, 7, 8});
    if (HasFailure()) return;
  }
}

TEST(GradientSchedule, LongDocumentsOfOddChunkCounts) {
  for (const std::int64_t chunks : {31, 64, 67})
    run_all(batch_of_one(chunks, chunks), {kContiguous, kZigzag}, {1}, {1, 3, 4, 8});
  run_all(batch_of_one(20, 45), {kContiguous, kZigzag}, {1}, {2, 3, 4});
  run_all(batch_of_one(45, 20), {kContiguous, kZigzag}, {1}, {2, 3, 4});
}

TEST(GradientSchedule, RandomPacks) {
  for (std::uint64_t seed = 0; seed < 3; ++seed)
    run_all(random_pack(seed, 20, 70), {kContiguous, kZigzag}, {8}, {2, 5});
}

TEST(GradientSchedule, DualChunk) {
  // Lengths that 2P divides for P = 2, 3, 4; chunks that its parts do and do not meet.
  for (const SequenceBatch& batch :
       {batch_of_one(96, 96), batch_of_one(48, 96), pack({24, 0, 72, 48}), pack({0, 24}, {48, 0})})
    run_all(batch, {kDualChunk}, {2, 5, 7, 100}, {1, 2, 3, 4});
}

TEST(GradientSchedule, WhatWaitsGrowsWithTheLogarithmOfTheChunks) {
  // A rank has one run of neighbouring q chunks (contiguous) or two (zigzag), and a run of n leaves
  // is at most 2 log2(n) nodes; the same holds for what the ring has brought of a q chunk's tree.
  // Slots that one step frees serve others from the next step on: twice that.
  for (const ShardingKind sharding : {kContiguous, kZigzag})
    for (const MaskKind mask : {MaskKind::full, MaskKind::causal})
      for (const std::int64_t chunks : {16, 64, 100})
        for (const int world_size : {1, 2, 3, 4, 8}) {
          CpConfig config;
          config.chunk_tokens = 1;
          config.mask = mask;
          config.sharding = sharding;
          const SequenceBatch batch = batch_of_one(chunks, chunks);
          SymbolicRun run(batch, config, world_size);
          ASSERT_NO_FATAL_FAILURE(run.check());
          const double runs = sharding == kContiguous ? 1 : 2;
          const double limit = runs * 2 * std::log2(static_cast<double>(chunks));
          for (int rank = 0; rank < world_size; ++rank) {
            const GradientSchedule& schedule = run.schedule(rank);
            const Shard& shard = run.sharding().shards[static_cast<std::size_t>(rank)];
            EXPECT_LE(schedule.num_dq_slots, 2 * limit * static_cast<double>(shard.q.size()));
            for (const GradientStep& step : schedule.steps)
              for (const KvPlaces& places : step.kv) EXPECT_LE(places.num_places, limit + 1);
            for (const std::int32_t slots : schedule.carried_dkv) EXPECT_LE(slots, limit + 1);
          }
        }
}

TEST(GradientSchedule, EvenSplitsSendOnePiecePerRun) {
  // Powers of two of chunks and ranks: a run is one node of the tree.
  for (const auto& [sharding, expected] : {std::pair{kContiguous, 1}, std::pair{kZigzag, 2}})
    for (const int world_size : {2, 4}) {
      CpConfig config;
      config.chunk_tokens = 1;
      config.mask = MaskKind::full;
      config.sharding = sharding;
      const SequenceBatch batch = batch_of_one(64, 64);
      const Sharding shards = make_sharding(batch, config, world_size);
      for (int rank = 0; rank < world_size; ++rank) {
        const GradientSchedule schedule =
            make_gradient_schedule(batch, shards, config, rank, world_size);
        for (const GradientStep& step : schedule.steps)
          for (const KvPlaces& places : step.kv) EXPECT_EQ(places.num_pieces, expected);
      }
    }
}

}  // namespace
}  // namespace cpattn::testing
