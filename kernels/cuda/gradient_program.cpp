#include "kernels/cuda/gradient_program.h"

#include <algorithm>

#include "kernels/cuda/image_parts.h"
#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

/// Chunks have at most 2^24 tokens (CpConfig), so limits beyond this see all keys or none.
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;

/// Writes ops while it follows which slot's value is in the accumulator. Scratch lives in the
/// accumulator only.
class Lowering {
 public:
  void add_leaf(SlotIndex slot, bool continues, std::int32_t partner, std::int32_t limit) {
    if (continues) {
      bring(slot);
    } else {
      spill();
    }
    ops_.push_back(
        {continues ? GradientOpKind::continue_leaf : GradientOpKind::leaf, 0, partner, limit});
    hold(slot);
  }

  void add_sum(const SumOp& op) {
    const bool is_right_held = holds(op.right) && !holds(op.left);
    if (!is_right_held) bring(op.left);
    const SlotIndex other = is_right_held ? op.left : op.right;
    require_memory(other);
    ops_.push_back({GradientOpKind::add, other});
    hold(op.dst);
  }

  void finish(SlotIndex slot) {
    bring(slot);
    ops_.push_back({GradientOpKind::finish});
    is_held_ = false;
  }

  /// A scratch value is worth nothing to the next task.
  void end_task() {
    if (is_held_ && is_scratch(held_)) is_held_ = false;
  }

  std::vector<GradientOp> take() {
    spill();
    return std::move(ops_);
  }

 private:
  static void require_memory(SlotIndex slot) {
    require(!is_scratch(slot), "a sum or a result reads scratch slot ", scratch_number(slot),
            ", which is not the last value: expected the leaf in the first sum");
  }

  void hold(SlotIndex slot) {
    held_ = slot;
    is_held_ = true;
    is_stored_ = false;
  }
  bool holds(SlotIndex slot) const { return is_held_ && held_ == slot; }

  void store() {
    require_memory(held_);
    if (!is_stored_) ops_.push_back({GradientOpKind::store, held_});
    is_stored_ = true;
  }

  /// A value that nothing has read yet goes to its slot.
  void spill() {
    if (is_held_) store();
    is_held_ = false;
  }

  void bring(SlotIndex slot) {
    if (holds(slot)) return;
    spill();
    require_memory(slot);
    ops_.push_back({GradientOpKind::load, slot});
    hold(slot);
    is_stored_ = true;
  }

  std::vector<GradientOp> ops_;
  SlotIndex held_ = 0;
  bool is_held_ = false;
  bool is_stored_ = false;  ///< the slot has the same value
};

std::vector<std::vector<GradientOp>> taken(std::vector<Lowering>& lowerings) {
  std::vector<std::vector<GradientOp>> ops;
  for (Lowering& lowering : lowerings) ops.push_back(lowering.take());
  return ops;
}

std::int32_t limit_of(const BackwardArgs& args, const GradientTask& task) {
  const std::int64_t num_keys = args.kv_blocks[static_cast<std::size_t>(task.kv_block)].num_keys;
  const std::int64_t limit =
      task.mask.kind == MaskKind::full ? num_keys : task.mask.first_row_limit;
  return static_cast<std::int32_t>(std::clamp(limit, -kMaxRows, kMaxRows));
}

/// How many of the `num_rows` rows of a task see `key`.
std::int64_t rows_that_see(const GradientOp& op, std::int64_t key, std::int64_t num_rows) {
  return num_rows - std::clamp<std::int64_t>(key + 1 - op.first_row_limit, 0, num_rows);
}

bool is_leaf(const GradientOp& op) {
  return op.kind == GradientOpKind::leaf || op.kind == GradientOpKind::continue_leaf;
}

/// Keys that the last row of a tile sees, or rows that see its first key: what its work is
/// proportional to.
using WorkOf = std::int64_t (*)(const GradientImage& image, const GradientTile& tile, int size);

std::int64_t work_of_rows(const GradientImage& image, const GradientTile& tile, int size) {
  const GradientRows& rows = image.part<GradientRows>(image.rows)[tile.owner];
  const std::int64_t last_row = std::min<std::int64_t>(rows.num_rows, tile.first + size) - 1;
  std::int64_t keys = 0;
  for (std::int32_t i = rows.op_begin; i < rows.op_end; ++i) {
    const GradientOp& op = image.part<GradientOp>(image.ops)[i];
    if (!is_leaf(op)) continue;
    const std::int64_t num_keys = image.part<GradientKeys>(image.keys)[op.partner].num_keys;
    keys += std::clamp<std::int64_t>(op.first_row_limit + last_row, 0, num_keys);
  }
  return keys;
}

std::int64_t work_of_keys(const GradientImage& image, const GradientTile& tile, int /*size*/) {
  const GradientKeys& keys = image.part<GradientKeys>(image.keys)[tile.owner];
  std::int64_t rows = 0;
  for (std::int32_t i = keys.op_begin; i < keys.op_end; ++i) {
    const GradientOp& op = image.part<GradientOp>(image.ops)[i];
    if (!is_leaf(op)) continue;
    rows +=
        rows_that_see(op, tile.first, image.part<GradientRows>(image.rows)[op.partner].num_rows);
  }
  return rows;
}

/// Tiles of an owner with `length` rows or keys.
template <class Owner>
void add_tiles(const Owner& owner, std::size_t index, std::int64_t length, int size,
               std::vector<GradientTile>& tiles) {
  if (owner.op_begin == owner.op_end) return;
  for (std::int64_t first = 0; first < length; first += size)
    tiles.push_back({narrow<std::int32_t>(index), narrow<std::int32_t>(first)});
}

void sort_by_work(const GradientImage& image, WorkOf work_of, int size,
                  std::vector<GradientTile>& tiles) {
  std::vector<std::pair<std::int64_t, GradientTile>> keyed;
  for (const GradientTile& tile : tiles) keyed.emplace_back(work_of(image, tile, size), tile);
  std::stable_sort(keyed.begin(), keyed.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (std::size_t i = 0; i < tiles.size(); ++i) tiles[i] = keyed[i].second;
}

/// All parts of an image but the order of its tiles.
struct Walks {
  std::vector<GradientRows> rows;
  std::vector<GradientKeys> keys;
  std::vector<GradientOp> ops;
  std::vector<GradientTile> row_tiles, key_tiles;
};

Walks make_walks(const BackwardArgs& args, GradientTileSizes sizes) {
  Walks walks;
  const auto append = [&](const std::vector<GradientOp>& ops, auto& owner) {
    owner.op_begin = narrow<std::int32_t>(walks.ops.size());
    walks.ops.insert(walks.ops.end(), ops.begin(), ops.end());
    owner.op_end = narrow<std::int32_t>(walks.ops.size());
  };
  const auto dq = lower_dq(args), dkv = lower_dkv(args);
  for (std::size_t i = 0; i < args.q_blocks.size(); ++i) {
    const QueryBlock& block = args.q_blocks[i];
    GradientRows rows{block.packed, block.row_begin, narrow<std::int32_t>(block.num_rows)};
    append(dq[i], rows);
    add_tiles(rows, i, block.num_rows, sizes.rows, walks.row_tiles);
    walks.rows.push_back(rows);
  }
  for (std::size_t i = 0; i < args.kv_blocks.size(); ++i) {
    const KvBlock& block = args.kv_blocks[i];
    GradientKeys keys{block.packed, narrow<std::int32_t>(block.num_keys)};
    append(dkv[i], keys);
    add_tiles(keys, i, block.num_keys, sizes.keys, walks.key_tiles);
    walks.keys.push_back(keys);
  }
  return walks;
}

}  // namespace

std::vector<std::vector<GradientOp>> lower_dq(const BackwardArgs& args) {
  std::vector<Lowering> chunks(args.q_blocks.size());
  for (const GradientTask& task : args.tasks) {
    Lowering& chunk = chunks[static_cast<std::size_t>(task.q_chunk)];
    chunk.add_leaf(task.dq, task.continues_dq, task.kv_block, limit_of(args, task));
    for (const SumOp& op : task.dq_sums) chunk.add_sum(op);
    if (task.dq_result != kNoSlot) chunk.finish(task.dq_result);
    chunk.end_task();
  }
  return taken(chunks);
}

std::vector<std::vector<GradientOp>> lower_dkv(const BackwardArgs& args) {
  std::vector<Lowering> blocks(args.kv_blocks.size());
  for (const GradientTask& task : args.tasks) {
    Lowering& block = blocks[static_cast<std::size_t>(task.kv_block)];
    block.add_leaf(task.dkv, task.continues_dkv, task.q_chunk, limit_of(args, task));
    for (const SumOp& op : task.dkv_sums) block.add_sum(op);
    block.end_task();
  }
  return taken(blocks);
}

std::vector<std::byte> make_gradient_image(const BackwardArgs& args, GradientTileSizes sizes) {
  Walks walks = make_walks(args, sizes);
  const std::vector<std::byte*> dkv_slots(args.dkv_slots.begin(), args.dkv_slots.end());
  ImageParts parts(sizeof(GradientImage));
  GradientImage header;
  header.num_row_tiles = narrow<std::int32_t>(walks.row_tiles.size());
  header.num_key_tiles = narrow<std::int32_t>(walks.key_tiles.size());
  header.row_tiles = parts.reserve(walks.row_tiles);
  header.key_tiles = parts.reserve(walks.key_tiles);
  header.rows = parts.reserve(walks.rows);
  header.keys = parts.reserve(walks.keys);
  header.ops = parts.reserve(walks.ops);
  header.dkv_slots = parts.reserve(dkv_slots);
  parts.begin(header);
  parts.write(header.rows, walks.rows);
  parts.write(header.keys, walks.keys);
  parts.write(header.ops, walks.ops);
  parts.write(header.dkv_slots, dkv_slots);
  const auto& image = parts.header<GradientImage>();
  sort_by_work(image, work_of_rows, sizes.rows, walks.row_tiles);
  sort_by_work(image, work_of_keys, sizes.keys, walks.key_tiles);
  parts.write(header.row_tiles, walks.row_tiles);
  parts.write(header.key_tiles, walks.key_tiles);
  return parts.take();
}

}  // namespace cpattn::cuda
