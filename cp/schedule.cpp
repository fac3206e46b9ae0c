#include "cp/schedule.h"

#include <algorithm>
#include <limits>

#include "cp/shuffle.h"
#include "cp/slot_pool.h"
#include "cp/visibility.h"
#include "src/base/error.h"
#include "src/base/integers.h"
#include "src/base/reduction_tree.h"

namespace cpattn {
namespace {

/// One q chunk on its way through the steps.
struct QueryChunk {
  OwnedChunk chunk;
  Document document;
  std::int64_t num_visible = 0;   ///< kv chunks it sees: a prefix of the document's
  std::int64_t num_seen = 0;      ///< of those, how many have arrived
  ReductionTree tree{0};          ///< canonical
  std::vector<SlotIndex> values;  ///< slot of every partial that was ever made, by id
};

/// An op whose slots are still ids of partials.
struct DraftOp {
  StateOp op;
  int dst = -1;
  int left = -1;
  int right = -1;
};

class Builder {
 public:
  Builder(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config, int rank,
          int num_steps)
      : sharding_(sharding), config_(config), rank_(rank) {
    const int world_size = static_cast<int>(sharding.shards.size());
    schedule_.direction = ring_direction(config);
    const auto at = [&](int offset) {
      return ((rank + offset) % world_size + world_size) % world_size;
    };
    for (int t = 0; t < num_steps; ++t) {
      Step step;
      step.kv_owner = at(-t * schedule_.direction);
      if (t + 1 < num_steps) {
        step.send_to = at(schedule_.direction);
        step.receive_from = at(-schedule_.direction);
      }
      schedule_.steps.push_back(step);
    }
    for (const OwnedChunk& chunk : sharding.shards[static_cast<std::size_t>(rank)].q) {
      const Document& document = batch.documents[static_cast<std::size_t>(chunk.document)];
      const std::int64_t visible = num_visible_kv_chunks(
          document, chunk, config.mask, chunk_grid(document.kv_tokens, config, world_size));
      chunks_.push_back({chunk, document, visible, 0, ReductionTree(visible), {}});
    }
  }

  Schedule build() {
    for (std::size_t t = 0; t < schedule_.steps.size(); ++t) {
      for (std::size_t q = 0; q < chunks_.size(); ++q) add_program(t, q);
      for (const int slot : freed_) carried_.give(slot);  // reusable from the next step on
      freed_.clear();
    }
    schedule_.num_carried_slots = carried_.size();
    schedule_.num_scratch_slots = std::max(num_scratch_, 1);
    return std::move(schedule_);
  }

 private:
  /// Indices into the owner's Shard::kv of the chunks this q chunk sees, in the order to work on
  /// them.
  std::vector<std::int32_t> arrivals(std::size_t step, std::size_t q_index) const {
    const QueryChunk& q = chunks_[q_index];
    const auto& kv = sharding_.shards[static_cast<std::size_t>(schedule_.steps[step].kv_owner)].kv;
    auto it = std::lower_bound(
        kv.begin(), kv.end(), q.chunk.document,
        [](const OwnedChunk& chunk, std::int32_t document) { return chunk.document < document; });
    std::vector<std::int32_t> result;
    for (; it != kv.end() && it->document == q.chunk.document && it->chunk < q.num_visible; ++it) {
      result.push_back(narrow<std::int32_t>(it - kv.begin()));
    }
    if (config_.shuffle_arrival != 0) {
      shuffle(result, static_cast<std::uint64_t>(config_.shuffle_arrival) ^
                          mix((step << 32) ^ q_index ^ (static_cast<std::uint64_t>(rank_) << 48)));
    }
    return result;
  }

  void add_program(std::size_t step, std::size_t q_index) {
    QueryChunk& q = chunks_[q_index];
    const std::size_t first_value = q.values.size();
    std::vector<DraftOp> draft;
    if (q.num_visible == 0) {
      if (step > 0) return;
      draft.push_back({{.kind = StateOpKind::finalize_empty}});
    }
    for (const std::int32_t kv_index : arrivals(step, q_index)) add_block(step, q, kv_index, draft);
    if (draft.empty()) return;
    if (q.num_visible > 0 && q.num_seen == q.num_visible) {
      draft.push_back({.op = {.kind = StateOpKind::finalize}, .left = survivor(q)});
    }
    const auto begin = static_cast<std::int64_t>(schedule_.ops.size());
    place(q, first_value, draft);
    schedule_.steps[step].programs.push_back(
        {narrow<std::int32_t>(q_index), begin, static_cast<std::int64_t>(schedule_.ops.size())});
  }

  void add_block(std::size_t step, QueryChunk& q, std::int32_t kv_index,
                 std::vector<DraftOp>& draft) {
    const auto owner = static_cast<std::size_t>(schedule_.steps[step].kv_owner);
    const OwnedChunk& kv = sharding_.shards[owner].kv[static_cast<std::size_t>(kv_index)];
    StateOp op{.kind = StateOpKind::block,
               .kv_block = kv_index,
               .mask = block_mask(q.document, q.chunk, kv, config_.mask)};
    ++q.num_seen;
    if (config_.schedule == ScheduleKind::arrival && !q.values.empty()) {
      op.kind = StateOpKind::accumulate;
      draft.push_back({.op = op, .dst = 0});
      return;
    }
    const int id = new_value(q);
    draft.push_back({.op = op, .dst = id});
    if (config_.schedule == ScheduleKind::arrival) return;
    q.tree.add(kv.chunk, id, [&](int left, int right) {
      const int merged = new_value(q);
      draft.push_back({{.kind = StateOpKind::merge}, merged, left, right});
      return merged;
    });
  }

  static int new_value(QueryChunk& q) {
    q.values.push_back(kNowhere);
    return static_cast<int>(q.values.size()) - 1;
  }

  /// The id that holds the result once everything has been seen.
  int survivor(const QueryChunk& q) const {
    const int id = config_.schedule == ScheduleKind::arrival ? 0 : q.tree.root();
    invariant(id >= 0, "q chunk ", q.chunk.chunk, " is not merged into one");
    return id;
  }

  /// Gives every partial a slot: carried for those that outlive the step, scratch for the others.
  void place(QueryChunk& q, std::size_t first_value, const std::vector<DraftOp>& draft) {
    const bool is_done = q.num_seen == q.num_visible;
    for (std::size_t id = first_value; id < q.values.size(); ++id) {
      const bool is_pending =
          config_.schedule == ScheduleKind::arrival ||
          std::any_of(q.tree.pending().begin(), q.tree.pending().end(),
                      [&](const auto& node) { return node.second == static_cast<int>(id); });
      if (is_pending && !is_done) q.values[id] = carried_.take();
    }
    SlotPool scratch;
    const auto release = [&](int id) {
      if (id < 0) return;
      const SlotIndex slot = q.values[static_cast<std::size_t>(id)];
      if (is_scratch(slot)) {
        scratch.give(scratch_number(slot));
      } else {
        freed_.push_back(slot);
      }
    };
    for (const DraftOp& item : draft) {
      StateOp op = item.op;
      if (item.left >= 0) op.left = q.values[static_cast<std::size_t>(item.left)];
      if (item.right >= 0) op.right = q.values[static_cast<std::size_t>(item.right)];
      release(item.left);
      release(item.right);
      if (item.dst >= 0) {
        SlotIndex& slot = q.values[static_cast<std::size_t>(item.dst)];
        if (slot == kNowhere) slot = scratch_slot(scratch.take());
        op.dst = slot;
      }
      schedule_.ops.push_back(op);
    }
    num_scratch_ = std::max(num_scratch_, scratch.size());
  }

  static constexpr SlotIndex kNowhere = std::numeric_limits<SlotIndex>::min();

  const Sharding& sharding_;
  const CpConfig& config_;
  int rank_;
  Schedule schedule_;
  std::vector<QueryChunk> chunks_;
  SlotPool carried_;
  std::vector<int> freed_;
  int num_scratch_ = 0;
};

}  // namespace

int ring_direction(const CpConfig& config) {
  const bool is_turned = config.shuffle_arrival % 2 != 0;
  const bool is_seen_before =
      config.mask == MaskKind::causal && config.sharding != ShardingKind::contiguous;
  return is_seen_before != is_turned ? -1 : 1;
}

Schedule make_schedule(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config,
                       int rank, int num_steps) {
  return Builder(batch, sharding, config, rank, num_steps).build();
}

}  // namespace cpattn
