#include "cp/gradient_schedule.h"

#include <algorithm>
#include <span>
#include <tuple>

#include "cp/schedule.h"
#include "cp/shuffle.h"
#include "cp/slot_pool.h"
#include "cp/visibility.h"
#include "src/base/error.h"
#include "src/base/integers.h"
#include "src/base/reduction_tree.h"

namespace cpattn {
namespace {

/// The chunks of one document within a shard's list.
std::span<const OwnedChunk> chunks_of(const std::vector<OwnedChunk>& chunks,
                                      std::int32_t document) {
  const auto begin =
      std::lower_bound(chunks.begin(), chunks.end(), document,
                       [](const OwnedChunk& chunk, std::int32_t d) { return chunk.document < d; });
  auto end = begin;
  while (end != chunks.end() && end->document == document) ++end;
  return {begin, end};
}

/// The leaves that one rank makes of one kv chunk, in ascending order: what waits is a stack.
class LeafStack {
 public:
  LeafStack(std::int64_t first, std::int64_t end) : tree_(first, end) {}

  /// Returns how many sums the leaf makes possible: with the last place, the one before, and so on.
  int push(std::int64_t leaf) {
    int sums = 0;
    tree_.add(leaf, depth_, [&](int left, int right) {
      invariant(right == depth_ - sums && left == right - 1, "leaves that do not ascend");
      ++sums;
      return left;
    });
    num_places_ = std::max(num_places_, sums > 0 ? depth_ : depth_ + 1);
    depth_ += 1 - sums;
    return sums;
  }
  int depth() const { return depth_; }
  int num_places() const { return num_places_; }
  /// By place.
  std::vector<TreeNode> nodes() const {
    std::vector<TreeNode> result(static_cast<std::size_t>(depth_));
    for (const auto& [node, place] : tree_.pending())
      result[static_cast<std::size_t>(place)] = node;
    return result;
  }

 private:
  ReductionTree tree_;
  int depth_ = 0;
  int num_places_ = 0;
};

/// Values that come in any order, folded along a tree; those that wait are in slots.
class TreeFold {
 public:
  TreeFold(std::int64_t first, std::int64_t end) : tree_(first, end) {}

  /// `value` is where the new partial is when it comes. Returns the slot it has to be put into
  /// because it waits, or `value` itself when it is used at once. Appends the sums that are
  /// possible now.
  SlotIndex add(TreeNode node, SlotIndex value, SlotPool& pool, std::vector<SumOp>& sums) {
    const bool is_fresh = free_.empty();
    const int slot = take(pool);
    bool is_waiting = true;
    tree_.add(node, slot, [&](int left, int right) {
      if (!is_waiting) {
        sums.push_back({left, left, right});
        free_.push_back(right);
        return left;
      }
      is_waiting = false;
      const bool is_left = left == slot;
      const int other = is_left ? right : left;
      sums.push_back({other, is_left ? value : other, is_left ? other : value});
      return other;
    });
    if (is_waiting && !tree_.is_complete()) return slot;
    is_fresh ? pool.give(slot) : free_.push_back(slot);
    if (tree_.is_complete()) root_ = is_waiting ? value : SlotIndex{tree_.root()};
    return value;
  }

  /// The partial of `node` is in the pool's next slot already, and can be summed with no other.
  void add_in_place(TreeNode node, SlotPool& pool) {
    const int slot = pool.take();
    tree_.add(node, slot,
              [](int, int) -> int { throw InternalError("pieces that are not maximal"); });
    if (tree_.is_complete()) root_ = slot;
  }

  /// Where the sum of everything is; kNoSlot before all has come.
  SlotIndex root() const { return root_; }

  /// Until now, slots that were freed were used again by this fold only; others may have them now,
  /// and that of the root too.
  void release(SlotPool& pool) {
    for (const int slot : free_) pool.give(slot);
    free_.clear();
    if (root_ >= 0) pool.give(root_);
    root_ = kNoSlot;
  }

 private:
  int take(SlotPool& pool) {
    if (free_.empty()) return pool.take();
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }

  ReductionTree tree_;
  SlotIndex root_ = kNoSlot;
  std::vector<int> free_;
};

/// An own q chunk on its way through the steps.
struct QueryChunk {
  std::int64_t num_visible = 0;  ///< kv chunks
  std::int64_t num_seen = 0;
  TreeFold fold{0, 0};
  SlotIndex running = kNoSlot;  ///< arrival: its only slot
};

/// An own kv chunk, waiting for its pieces.
struct KvChunk {
  std::int64_t first = 0;  ///< q chunks that see it: [first, end)
  std::int64_t end = 0;
  int num_missing = 0;  ///< arrival: pieces still to come
  TreeFold fold{0, 0};
  SlotPool slots;
};

class Builder {
 public:
  Builder(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config, int rank,
          int num_steps)
      : batch_(batch),
        sharding_(sharding),
        config_(config),
        rank_(rank),
        world_size_(static_cast<int>(sharding.shards.size())),
        num_steps_(num_steps),
        direction_(ring_direction(config)) {
    for (const OwnedChunk& q : own().q) {
      const std::int64_t visible =
          num_visible_kv_chunks(document_of(q), q, config.mask, grid(document_of(q).kv_tokens));
      q_chunks_.push_back({visible, 0, TreeFold(0, visible), kNoSlot});
    }
    for (const OwnedChunk& kv : own().kv) {
      const auto [first, end] = seeing_q_chunks(kv);
      kv_chunks_.push_back({first, end, 0, TreeFold(first, end), {}});
      for (int r = 0; r < world_size_; ++r)
        kv_chunks_.back().num_missing += pieces_of(r, kv).empty() ? 0 : 1;
    }
  }

  GradientSchedule build() {
    for (std::size_t q = 0; q < q_chunks_.size(); ++q)
      if (q_chunks_[q].num_visible == 0) result_.unseeing_q.push_back(narrow<std::int32_t>(q));
    for (int t = 0; t < num_steps_; ++t) add_step(t);
    result_.num_dq_slots = dq_slots_.size();
    for (const KvChunk& kv : kv_chunks_) result_.carried_dkv.push_back(kv.slots.size());
    return std::move(result_);
  }

 private:
  struct Pair {
    std::int64_t wave;
    std::int32_t q;   ///< index into own Shard::q
    std::int32_t kv;  ///< index into the owner's Shard::kv
  };

  bool is_arrival() const { return config_.schedule == ScheduleKind::arrival; }
  const Shard& own() const { return shard(rank_); }
  const Shard& shard(int rank) const { return sharding_.shards[static_cast<std::size_t>(rank)]; }
  const Document& document_of(const OwnedChunk& chunk) const {
    return batch_.documents[static_cast<std::size_t>(chunk.document)];
  }
  ChunkGrid grid(std::int64_t tokens) const { return chunk_grid(tokens, config_, world_size_); }

  /// [first, end), empty when no q chunk sees the kv chunk.
  std::pair<std::int64_t, std::int64_t> seeing_q_chunks(const OwnedChunk& kv) const {
    const Document& document = document_of(kv);
    const ChunkGrid q_grid = grid(document.q_tokens);
    return {first_seeing_q_chunk(document, kv, config_.mask, q_grid), q_grid.num_chunks()};
  }

  /// What rank `sender` makes of a kv chunk.
  LeafStack leaves_of(int sender, const OwnedChunk& kv) const {
    const auto [first, end] = seeing_q_chunks(kv);
    LeafStack stack(first, end);
    for (const OwnedChunk& q : chunks_of(shard(sender).q, kv.document))
      if (q.chunk >= first) stack.push(q.chunk);
    return stack;
  }

  /// The nodes it sends; in `arrival` one, of no meaning.
  std::vector<TreeNode> pieces_of(int sender, const OwnedChunk& kv) const {
    std::vector<TreeNode> nodes = leaves_of(sender, kv).nodes();
    if (is_arrival() && nodes.size() > 1) nodes.resize(1);
    return nodes;
  }

  void add_step(int t) {
    GradientStep step;
    step.kv_owner = peer(-t);
    step.pieces_from = t == 0 ? -1 : peer(t);
    add_places(step);
    step.task_begin = size(result_.tasks);
    add_tasks(t, step);
    step.task_end = size(result_.tasks);
    step.fold_begin = size(result_.folds);
    add_folds(step);
    step.fold_end = size(result_.folds);
    result_.steps.push_back(std::move(step));
    for (QueryChunk& q : q_chunks_) q.fold.release(dq_slots_);
  }

  int peer(int offset) const {
    return ((rank_ + offset * direction_) % world_size_ + world_size_) % world_size_;
  }

  template <class T>
  static std::int64_t size(const std::vector<T>& items) {
    return static_cast<std::int64_t>(items.size());
  }

  void add_places(GradientStep& step) const {
    for (const OwnedChunk& kv : shard(step.kv_owner).kv) {
      const LeafStack stack = leaves_of(rank_, kv);
      KvPlaces places{step.num_places, stack.num_places(), stack.depth()};
      if (is_arrival()) places.num_places = places.num_pieces = std::min(places.num_pieces, 1);
      step.num_places += places.num_places;
      step.kv.push_back(places);
    }
  }

  /// Visible pairs of the step in waves.
  std::vector<Pair> pairs_of(int t, const GradientStep& step) const {
    const std::vector<OwnedChunk>& kv = shard(step.kv_owner).kv;
    std::vector<std::int64_t> place(kv.size());
    for (std::size_t j = 0; j < kv.size(); ++j) place[j] = static_cast<std::int64_t>(j);
    if (config_.shuffle_arrival != 0) {
      shuffle(place, static_cast<std::uint64_t>(config_.shuffle_arrival) ^
                         mix(static_cast<std::uint64_t>(t) << 32 ^ static_cast<unsigned>(rank_)));
    }
    std::vector<Pair> pairs;
    for (std::size_t i = 0; i < own().q.size(); ++i) {
      const auto seen = chunks_of(kv, own().q[i].document);
      for (const OwnedChunk& chunk : seen) {
        if (chunk.chunk >= q_chunks_[i].num_visible) break;
        const auto j = static_cast<std::size_t>(&chunk - kv.data());
        pairs.push_back({static_cast<std::int64_t>(i) + place[j], narrow<std::int32_t>(i),
                         narrow<std::int32_t>(j)});
      }
    }
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      return std::tie(a.wave, a.q) < std::tie(b.wave, b.q);
    });
    return pairs;
  }

  void add_tasks(int t, const GradientStep& step) {
    const std::vector<OwnedChunk>& kv = shard(step.kv_owner).kv;
    std::vector<LeafStack> stacks;
    for (const OwnedChunk& chunk : kv) {
      const auto [first, end] = seeing_q_chunks(chunk);
      stacks.emplace_back(first, end);
    }
    std::vector<bool> is_started(kv.size(), false);
    for (const Pair& pair : pairs_of(t, step)) {
      const auto j = static_cast<std::size_t>(pair.kv);
      const OwnedChunk& q = own().q[static_cast<std::size_t>(pair.q)];
      ScheduledTask item;
      item.task.q_chunk = pair.q;
      item.task.kv_block = pair.kv;
      item.task.mask = block_mask(document_of(q), q, kv[j], config_.mask);
      item.dq_sum_begin = size(result_.sums);
      add_dq(q_chunks_[static_cast<std::size_t>(pair.q)], kv[j].chunk, item.task);
      item.dq_sum_end = item.dkv_sum_begin = size(result_.sums);
      item.task.dkv = step.kv[j].first_place;
      if (is_arrival()) {
        item.task.continues_dkv = is_started[j];
        is_started[j] = true;
      } else {
        add_dkv(stacks[j], q.chunk, item.task);
      }
      item.dkv_sum_end = size(result_.sums);
      result_.tasks.push_back(item);
    }
  }

  void add_dq(QueryChunk& q, std::int64_t kv_chunk, GradientTask& task) {
    ++q.num_seen;
    if (!is_arrival()) {
      task.dq = q.fold.add({0, kv_chunk}, scratch_slot(0), dq_slots_, result_.sums);
      task.dq_result = q.fold.root();
      return;
    }
    task.continues_dq = q.running != kNoSlot;
    if (q.running == kNoSlot) q.running = dq_slots_.take();
    task.dq = q.running;
    if (q.num_seen == q.num_visible) task.dq_result = q.running;
  }

  /// `task.dkv` is the first place of the kv chunk.
  void add_dkv(LeafStack& stack, std::int64_t q_chunk, GradientTask& task) {
    const SlotIndex next = task.dkv + stack.depth();
    const int num_sums = stack.push(q_chunk);
    task.dkv = num_sums == 0 ? next : scratch_slot(0);
    for (int n = 0; n < num_sums; ++n) {
      const SlotIndex left = next - 1 - n;
      result_.sums.push_back({left, left, n == 0 ? scratch_slot(0) : left + 1});
    }
  }

  void add_folds(GradientStep& step) {
    for (std::size_t j = 0; j < kv_chunks_.size(); ++j) {
      KvChunk& kv = kv_chunks_[j];
      const auto id = narrow<std::int32_t>(j);
      const int sender = step.pieces_from < 0 ? rank_ : step.pieces_from;
      const std::vector<TreeNode> nodes = pieces_of(sender, own().kv[j]);
      if (step.pieces_from >= 0) step.arriving.push_back(narrow<std::int32_t>(size(nodes)));
      if (step.pieces_from < 0 && kv.num_missing == 0) {
        result_.folds.push_back({.kind = DkvOpKind::finish_empty, .kv_chunk = id});
      }
      if (nodes.empty()) continue;
      SlotIndex root = kNoSlot;
      if (is_arrival()) {
        root = add_to_running_sum(kv, id, step.pieces_from < 0);
      } else if (step.pieces_from < 0) {
        for (const TreeNode& node : nodes) kv.fold.add_in_place(node, kv.slots);
        root = kv.fold.root();
      } else {
        for (std::size_t k = 0; k < nodes.size(); ++k)
          add_piece(kv, id, nodes[k], scratch_slot(static_cast<int>(k)));
        root = kv.fold.root();
      }
      if (root == kNoSlot) continue;
      result_.folds.push_back({.kind = DkvOpKind::finish, .kv_chunk = id, .left = root});
    }
  }

  void add_piece(KvChunk& kv, std::int32_t id, TreeNode node, SlotIndex piece) {
    std::vector<SumOp> sums;
    const SlotIndex slot = kv.fold.add(node, piece, kv.slots, sums);
    if (slot != piece) {
      result_.folds.push_back(
          {.kind = DkvOpKind::copy, .kv_chunk = id, .dst = slot, .left = piece});
    }
    for (const SumOp& sum : sums)
      result_.folds.push_back({DkvOpKind::sum, id, sum.dst, sum.left, sum.right});
  }

  /// Returns where the sum is once nothing is missing.
  SlotIndex add_to_running_sum(KvChunk& kv, std::int32_t id, bool is_in_place) {
    const SlotIndex piece = scratch_slot(0);
    const bool is_first = kv.slots.size() == 0;
    --kv.num_missing;
    if (is_first && kv.num_missing == 0 && !is_in_place) return piece;
    if (is_first) kv.slots.take();  // slot 0
    if (!is_in_place) {
      result_.folds.push_back({is_first ? DkvOpKind::copy : DkvOpKind::sum, id, 0,
                               is_first ? piece : SlotIndex{0}, piece});
    }
    return kv.num_missing == 0 ? SlotIndex{0} : kNoSlot;
  }

  const SequenceBatch& batch_;
  const Sharding& sharding_;
  const CpConfig& config_;
  int rank_;
  int world_size_;
  int num_steps_;
  int direction_;
  GradientSchedule result_;
  std::vector<QueryChunk> q_chunks_;
  std::vector<KvChunk> kv_chunks_;
  SlotPool dq_slots_;
};

}  // namespace

GradientSchedule make_gradient_schedule(const SequenceBatch& batch, const Sharding& sharding,
                                        const CpConfig& config, int rank, int num_steps) {
  return Builder(batch, sharding, config, rank, num_steps).build();
}

}  // namespace cpattn
