#include "kernels/cuda/tile_program.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using testing::random_integer;

constexpr StateOp block(SlotIndex dst, int kv) {
  return {.kind = StateOpKind::block, .dst = dst, .kv_block = kv};
}
constexpr StateOp merge(SlotIndex dst, SlotIndex left, SlotIndex right) {
  return {.kind = StateOpKind::merge, .dst = dst, .left = left, .right = right};
}
constexpr StateOp finalize(SlotIndex left) { return {.kind = StateOpKind::finalize, .left = left}; }

const std::vector<KvBlock> kBlocks(8, KvBlock{nullptr, 100});

/// "kind slot/kv" of each op.
std::string text_of(const std::vector<TileOp>& ops) {
  static const std::map<TileOpKind, std::string> kNames{
      {TileOpKind::load, "load"},           {TileOpKind::block, "block"},
      {TileOpKind::accumulate, "continue"}, {TileOpKind::merge_left, "left"},
      {TileOpKind::merge_right, "right"},   {TileOpKind::store, "store"},
      {TileOpKind::finalize, "finalize"},   {TileOpKind::finalize_empty, "empty"}};
  std::string text;
  for (const TileOp& op : ops) {
    const bool is_block = op.kind == TileOpKind::block || op.kind == TileOpKind::accumulate;
    text += kNames.at(op.kind) + " " + std::to_string(is_block ? op.kv_block : op.slot) + "; ";
  }
  return text;
}

TEST(TileProgram, OneBlockNeverTouchesMemory) {
  const StateOp ops[] = {block(scratch_slot(0), 3), finalize(scratch_slot(0))};

  EXPECT_EQ(text_of(lower(ops, kBlocks)), "block 3; finalize 0; ");
}

TEST(TileProgram, AStateIsStoredOnlyWhenAnotherTakesItsPlace) {
  const StateOp ops[] = {block(-1, 0), block(-2, 1), merge(-1, -1, -2), block(-2, 2),
                         merge(0, -1, -2)};

  EXPECT_EQ(text_of(lower(ops, kBlocks)),
            "block 0; store -1; block 1; left -1; store -1; block 2; left -1; store 0; ");
}

TEST(TileProgram, LeftAndRightStayWhereTheyAre) {
  const StateOp ops[] = {block(-1, 0), merge(-1, -1, 4), block(-2, 1), merge(-1, 5, 6),
                         finalize(-1)};

  EXPECT_EQ(text_of(lower(ops, kBlocks)),
            "block 0; right 4; store -1; block 1; store -2; load 5; right 6; finalize 0; ");
}

TEST(TileProgram, AnOrderFreeStateGoesOn) {
  const StateOp ops[] = {{.kind = StateOpKind::accumulate, .dst = 2, .kv_block = 1},
                         {.kind = StateOpKind::accumulate, .dst = 2, .kv_block = 4}};

  EXPECT_EQ(text_of(lower(ops, kBlocks)), "load 2; continue 1; continue 4; store 2; ");
}

TEST(TileProgram, MasksBecomeLimits) {
  const StateOp ops[] = {
      block(0, 0),
      {.kind = StateOpKind::block, .dst = 1, .kv_block = 1, .mask = {MaskKind::causal, -7}},
      {.kind = StateOpKind::block,
       .dst = 2,
       .kv_block = 1,
       .mask = {MaskKind::causal, std::int64_t{1} << 40}}};

  const std::vector<TileOp> lowered = lower(ops, kBlocks);

  EXPECT_EQ(lowered[0].first_row_limit, 100);
  EXPECT_EQ(lowered[2].first_row_limit, -7);
  EXPECT_EQ(lowered[4].first_row_limit, 1 << 30);
}

/// States as texts: what a program makes, op by op, and what its lowered form makes.
using Memory = std::map<SlotIndex, std::string>;

std::string joined(const std::string& left, const std::string& right) {
  return "(" + left + " " + right + ")";
}

Memory meaning_of(std::span<const StateOp> ops) {
  Memory slots;
  for (const StateOp& op : ops) {
    switch (op.kind) {
      case StateOpKind::block:
        slots[op.dst] = std::to_string(op.kv_block);
        break;
      case StateOpKind::accumulate:
        slots[op.dst] += "+" + std::to_string(op.kv_block);
        break;
      case StateOpKind::merge: {
        const std::string merged = joined(slots.at(op.left), slots.at(op.right));
        slots.erase(op.left);
        slots.erase(op.right);
        slots[op.dst] = merged;
        break;
      }
      case StateOpKind::finalize:
      case StateOpKind::finalize_empty:
        break;
    }
  }
  return slots;
}

Memory meaning_of(const std::vector<TileOp>& ops) {
  Memory slots;
  std::string held;
  for (const TileOp& op : ops) {
    switch (op.kind) {
      case TileOpKind::load:
        held = slots.at(op.slot);
        break;
      case TileOpKind::block:
        held = std::to_string(op.kv_block);
        break;
      case TileOpKind::accumulate:
        held += "+" + std::to_string(op.kv_block);
        break;
      case TileOpKind::merge_left:
        held = joined(slots.at(op.slot), held);
        break;
      case TileOpKind::merge_right:
        held = joined(held, slots.at(op.slot));
        break;
      case TileOpKind::store:
        slots[op.slot] = held;
        break;
      case TileOpKind::finalize:
      case TileOpKind::finalize_empty:
        break;
    }
  }
  return slots;
}

TEST(TileProgram, RandomTreesMeanTheSame) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    std::uint64_t next = 0;
    const auto draw = [&](std::int64_t below) {
      return random_integer(seed, next++, 0, below - 1);
    };
    std::vector<StateOp> ops;
    std::vector<SlotIndex> live;
    SlotIndex fresh = 0;
    for (int i = 0; i < 30; ++i) {
      if (live.size() < 2 || draw(2) == 0) {
        ops.push_back(block(fresh, static_cast<int>(draw(8))));
        live.push_back(fresh++);
        continue;
      }
      const auto take = [&] {
        const auto place =
            static_cast<std::ptrdiff_t>(draw(static_cast<std::int64_t>(live.size())));
        const SlotIndex slot = live[static_cast<std::size_t>(place)];
        live.erase(live.begin() + place);
        return slot;
      };
      const SlotIndex left = take(), right = take();
      const std::int64_t place = draw(3);
      const SlotIndex dst = place == 0 ? left : place == 1 ? right : fresh++;
      ops.push_back(merge(dst, left, right));
      live.push_back(dst);
    }

    const Memory expected = meaning_of(ops);
    const Memory lowered = meaning_of(lower(ops, kBlocks));

    for (const auto& [slot, state] : expected) {
      ASSERT_TRUE(lowered.contains(slot)) << "seed " << seed << " slot " << slot;
      ASSERT_EQ(lowered.at(slot), state) << "seed " << seed << " slot " << slot;
    }
  }
}

TEST(TileProgram, AnImageHasTheLongestTilesFirst) {
  const StateOp causal[] = {
      {.kind = StateOpKind::block, .dst = 0, .kv_block = 0, .mask = {MaskKind::causal, 1}},
      finalize(0)};
  const StateOp full[] = {block(0, 0), block(1, 1), merge(0, 0, 1), finalize(0)};
  const QueryProgram programs[] = {{0, 100, causal}, {100, 65, full}};
  std::byte packed[2];
  const KvBlock blocks[] = {{&packed[0], 100}, {&packed[1], 30}};

  ForwardArgs step;
  step.kv_blocks = blocks;
  step.programs = programs;

  const std::vector<std::byte> bytes = make_step_image(step, 64);

  const auto& image = *reinterpret_cast<const StepImage*>(bytes.data());
  ASSERT_EQ(image.num_tiles, 4);
  const auto* tiles = image.part<RowTile>(image.tiles);
  const std::vector<std::pair<int, int>> order{{1, 0}, {1, 64}, {0, 64}, {0, 0}};
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(tiles[i].program, order[i].first);
    EXPECT_EQ(tiles[i].first_row, order[i].second);
  }
  const TileProgram& second = image.part<TileProgram>(image.programs)[1];
  EXPECT_EQ(second.row_begin, 100);
  EXPECT_EQ(second.num_rows, 65);
  EXPECT_EQ(image.part<TileOp>(image.ops)[second.op_begin].kind, TileOpKind::block);
  EXPECT_EQ(image.part<KeyBlock>(image.kv_blocks)[1].packed, &packed[1]);
  EXPECT_EQ(image.part<KeyBlock>(image.kv_blocks)[1].num_keys, 30);
}

TEST(TileProgram, AnEmptyStepIsAnImageToo) {
  const std::vector<std::byte> bytes = make_step_image({}, 64);

  EXPECT_EQ(reinterpret_cast<const StepImage*>(bytes.data())->num_tiles, 0);
}

}  // namespace
}  // namespace cpattn::cuda
