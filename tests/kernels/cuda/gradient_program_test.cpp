#include "kernels/cuda/gradient_program.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "src/base/error.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using testing::random_integer;

constexpr SlotIndex kLeaf = scratch_slot(0);

/// Tasks on q chunk 0, kv blocks 0, 1, ..., and what they are lowered to.
class Lowered {
 public:
  explicit Lowered(std::vector<GradientTask> tasks) : tasks_(std::move(tasks)) {
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      tasks_[i].kv_block = static_cast<std::int32_t>(i);
    }
    args_.kv_blocks = kv_blocks_;
    args_.q_blocks = q_blocks_;
    args_.tasks = tasks_;
  }

  const BackwardArgs& args() const { return args_; }
  std::vector<GradientOp> dq() const { return lower_dq(args_).front(); }
  std::string dq_text() const { return text_of(dq()); }

  static std::string text_of(const std::vector<GradientOp>& ops) {
    static const std::map<GradientOpKind, std::string> kNames{
        {GradientOpKind::load, "load"},   {GradientOpKind::leaf, "leaf"},
        {GradientOpKind::add, "add"},     {GradientOpKind::continue_leaf, "continue"},
        {GradientOpKind::store, "store"}, {GradientOpKind::finish, "finish"}};
    std::string text;
    for (const GradientOp& op : ops) {
      const bool is_leaf =
          op.kind == GradientOpKind::leaf || op.kind == GradientOpKind::continue_leaf;
      text += kNames.at(op.kind);
      if (op.kind != GradientOpKind::finish)
        text += " " + std::to_string(is_leaf ? op.partner : op.slot);
      text += "; ";
    }
    return text;
  }

 private:
  std::vector<KvBlock> kv_blocks_ = std::vector<KvBlock>(8, KvBlock{nullptr, 100});
  std::vector<QueryBlock> q_blocks_ = std::vector<QueryBlock>(2, QueryBlock{nullptr, 0, 90});
  std::vector<GradientTask> tasks_;
  BackwardArgs args_;
};

TEST(GradientProgram, ALeafThatIsTheResultNeverTouchesMemory) {
  EXPECT_EQ(Lowered({{.dq = 0, .dq_result = 0}}).dq_text(), "leaf 0; finish; ");
}

TEST(GradientProgram, SumsStayInTheAccumulator) {
  const SumOp up[] = {{1, 1, kLeaf}, {0, 0, 1}};

  EXPECT_EQ(Lowered({{.dq = 0}, {.dq = 1}, {.dq = kLeaf, .dq_sums = up, .dq_result = 0}}).dq_text(),
            "leaf 0; store 0; leaf 1; store 1; leaf 2; add 1; add 0; finish; ");
}

TEST(GradientProgram, AnUnrelatedSumLoadsItsSides) {
  const SumOp sums[] = {{0, 0, kLeaf}, {5, 3, 4}, {6, 5, 7}};

  EXPECT_EQ(Lowered({{.dq = kLeaf, .dq_sums = sums}}).dq_text(),
            "leaf 0; add 0; store 0; load 3; add 4; add 7; store 6; ");
}

TEST(GradientProgram, AnOrderFreeSlotGoesOn) {
  EXPECT_EQ(
      Lowered({{.dq = 2, .continues_dq = true}, {.dq = 2, .continues_dq = true, .dq_result = 2}})
          .dq_text(),
      "load 2; continue 0; continue 1; finish; ");
}

TEST(GradientProgram, ScratchIsForTheTaskOnly) {
  const SumOp late[] = {{3, 1, 2}, {3, 3, kLeaf}};

  EXPECT_EQ(Lowered({{.dq = kLeaf}, {.dq = 1}}).dq_text(), "leaf 0; leaf 1; store 1; ");
  EXPECT_THROW(Lowered({{.dq = kLeaf, .dq_sums = late}}).dq(), InvalidArgument);
  EXPECT_THROW(Lowered({{.dq = 1, .dq_result = kLeaf}}).dq(), InvalidArgument);
}

TEST(GradientProgram, MasksBecomeLimits) {
  const std::vector<GradientOp> ops =
      Lowered({{.mask = {}, .dq = 0},
               {.mask = {MaskKind::causal, -7}, .dq = 1},
               {.mask = {MaskKind::causal, std::int64_t{1} << 40}, .dq = 2}})
          .dq();

  EXPECT_EQ(ops[0].first_row_limit, 100);
  EXPECT_EQ(ops[2].first_row_limit, -7);
  EXPECT_EQ(ops[4].first_row_limit, 1 << 30);
}

/// Values as texts: left and right of a sum in the order of texts, since they may change places.
using Memory = std::map<SlotIndex, std::string>;

std::string sum_of(const std::string& left, const std::string& right) {
  return "(" + std::min(left, right) + "+" + std::max(left, right) + ")";
}

Memory meaning_of(std::span<const GradientTask> tasks) {
  Memory slots;
  for (const GradientTask& task : tasks) {
    slots[task.dkv] =
        (task.continues_dkv ? slots[task.dkv] + "," : "") + "q" + std::to_string(task.q_chunk);
    for (const SumOp& op : task.dkv_sums)
      slots[op.dst] = sum_of(slots.at(op.left), slots.at(op.right));
    slots.erase(kLeaf);
  }
  return slots;
}

Memory meaning_of(const std::vector<GradientOp>& ops) {
  Memory slots;
  std::string held;
  for (const GradientOp& op : ops) {
    switch (op.kind) {
      case GradientOpKind::load:
        held = slots.at(op.slot);
        break;
      case GradientOpKind::leaf:
        held = "q" + std::to_string(op.partner);
        break;
      case GradientOpKind::continue_leaf:
        held += ",q" + std::to_string(op.partner);
        break;
      case GradientOpKind::add:
        held = sum_of(held, slots.at(op.slot));
        break;
      case GradientOpKind::store:
        slots[op.slot] = held;
        break;
      case GradientOpKind::finish:
        ADD_FAILURE() << "only dq is finished here";
    }
  }
  return slots;
}

/// Draws tasks on one kv block whose sums are trees: what was read is overwritten or left alone.
class RandomTasks {
 public:
  explicit RandomTasks(std::uint64_t seed) : seed_(seed) {
    for (std::vector<SumOp>& sums : sums_) add_task(sums);
  }

  const std::vector<GradientTask>& tasks() const { return tasks_; }
  /// What the slots that are still of use hold.
  Memory live(const Memory& memory) const {
    Memory result;
    for (const SlotIndex slot : live_) result[slot] = memory.at(slot);
    return result;
  }

 private:
  std::size_t draw(std::size_t end) {
    return static_cast<std::size_t>(
        random_integer(seed_, draws_++, 0, static_cast<std::int64_t>(end) - 1));
  }
  SlotIndex take(std::vector<SlotIndex>& from) {
    const std::size_t place = draw(from.size());
    const SlotIndex slot = from[place];
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(place));
    return slot;
  }

  void add_sum(SlotIndex left, SlotIndex right, std::vector<SumOp>& sums) {
    if (!is_scratch(left)) dead_.push_back(left);
    if (!is_scratch(right)) dead_.push_back(right);
    live_.push_back(take(dead_));
    sums.push_back({live_.back(), left, right});
  }

  void add_task(std::vector<SumOp>& sums) {
    GradientTask task{.q_chunk = static_cast<std::int32_t>(draw(4))};
    const std::size_t kind = draw(3);
    if (live_.empty() || (kind == 0 && !dead_.empty())) {
      live_.push_back(task.dkv = take(dead_));
    } else if (kind == 1) {
      task.dkv = live_[draw(live_.size())];
      task.continues_dkv = true;
    } else {
      task.dkv = kLeaf;
      const SlotIndex other = take(live_);
      draw(2) == 0 ? add_sum(kLeaf, other, sums) : add_sum(other, kLeaf, sums);
    }
    for (std::size_t i = draw(3); i > 0 && live_.size() > 1; --i) {
      const SlotIndex left = take(live_);
      add_sum(left, take(live_), sums);
    }
    task.dkv_sums = sums;
    tasks_.push_back(task);
  }

  std::uint64_t seed_, draws_ = 0;
  std::vector<SlotIndex> live_, dead_{0, 1, 2, 3, 4};
  std::vector<std::vector<SumOp>> sums_ = std::vector<std::vector<SumOp>>(12);
  std::vector<GradientTask> tasks_;
};

TEST(GradientProgram, RandomTreesMeanTheSame) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    const RandomTasks random(seed);
    const std::vector<KvBlock> kv_blocks(1);
    BackwardArgs args;
    args.kv_blocks = kv_blocks;
    args.tasks = random.tasks();

    EXPECT_EQ(random.live(meaning_of(lower_dkv(args).front())),
              random.live(meaning_of(args.tasks)));
  }
}

TEST(GradientProgram, TheImageOrdersTilesByWorkAndLeavesOutWhatHasNone) {
  Lowered lowered({{.mask = {MaskKind::causal, 1}, .dq = 0, .dkv = 0}});
  std::byte* const slot = nullptr;
  BackwardArgs args = lowered.args();
  args.dkv_slots = {&slot, 1};

  const std::vector<std::byte> bytes = make_gradient_image(args, {.rows = 64, .keys = 32});
  const auto& image = *reinterpret_cast<const GradientImage*>(bytes.data());

  EXPECT_EQ(bytes.size() % 16, 0u);
  ASSERT_EQ(image.num_row_tiles, 2);  // of q chunk 0; q chunk 1 has no task
  EXPECT_EQ(image.part<GradientTile>(image.row_tiles)[0].first, 64);
  ASSERT_EQ(image.num_key_tiles, 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(image.part<GradientTile>(image.key_tiles)[i].owner, 0);
    EXPECT_EQ(image.part<GradientTile>(image.key_tiles)[i].first, 32 * i);
  }
  EXPECT_EQ(image.part<GradientRows>(image.rows)[0].num_rows, 90);
  EXPECT_EQ(image.part<GradientKeys>(image.keys)[0].num_keys, 100);
}

}  // namespace
}  // namespace cpattn::cuda
