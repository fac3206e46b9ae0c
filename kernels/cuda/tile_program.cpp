#include "kernels/cuda/tile_program.h"

#include <algorithm>

#include "kernels/cuda/image_parts.h"
#include "src/base/integers.h"

namespace cpattn::cuda {
namespace {

/// Chunks have at most 2^24 tokens (CpConfig), so limits beyond this see all keys or none.
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;

/// Writes ops while it follows which state is in the accumulator.
class Lowering {
 public:
  explicit Lowering(std::span<const KvBlock> kv_blocks) : kv_blocks_(kv_blocks) {}

  void add(const StateOp& op) {
    switch (op.kind) {
      case StateOpKind::block:
        spill();
        emit_block(TileOpKind::block, op);
        return hold(op.dst);
      case StateOpKind::accumulate:
        bring(op.dst);
        emit_block(TileOpKind::accumulate, op);
        return hold(op.dst);
      case StateOpKind::merge:
        merge(op);
        return hold(op.dst);
      case StateOpKind::finalize:
        bring(op.left);
        emit({TileOpKind::finalize});
        return let_go();
      case StateOpKind::finalize_empty:
        spill();
        emit({TileOpKind::finalize_empty});
        return let_go();
    }
  }

  std::vector<TileOp> finish() {
    spill();
    return std::move(ops_);
  }

 private:
  void emit(const TileOp& op) { ops_.push_back(op); }
  void hold(SlotIndex slot) {
    held_ = slot;
    is_held_ = true;
    is_stored_ = false;
  }
  void let_go() { is_held_ = false; }
  bool holds(SlotIndex slot) const { return is_held_ && held_ == slot; }

  /// A state that nothing has read yet goes to its slot.
  void spill() {
    if (is_held_ && !is_stored_) emit({TileOpKind::store, held_});
    let_go();
  }

  void bring(SlotIndex slot) {
    if (holds(slot)) return;
    spill();
    emit({TileOpKind::load, slot});
    hold(slot);
    is_stored_ = true;
  }

  void merge(const StateOp& op) {
    if (holds(op.right)) {
      emit({TileOpKind::merge_left, op.left});
    } else {
      bring(op.left);
      emit({TileOpKind::merge_right, op.right});
    }
  }

  void emit_block(TileOpKind kind, const StateOp& op) {
    const std::int64_t num_keys = kv_blocks_[static_cast<std::size_t>(op.kv_block)].num_keys;
    const std::int64_t limit = op.mask.kind == MaskKind::full ? num_keys : op.mask.first_row_limit;
    emit({kind, 0, op.kv_block,
          static_cast<std::int32_t>(std::clamp<std::int64_t>(limit, -kMaxRows, kMaxRows))});
  }

  std::span<const KvBlock> kv_blocks_;
  std::vector<TileOp> ops_;
  SlotIndex held_ = 0;
  bool is_held_ = false;
  bool is_stored_ = false;  ///< the slot has the same state
};

/// Keys that the rows of a tile see together: what its work is proportional to.
std::int64_t work_of(const StepImage& image, const RowTile& tile, int tile_rows) {
  const TileProgram& program = image.part<TileProgram>(image.programs)[tile.program];
  const std::int64_t last_row =
      std::min<std::int64_t>(program.num_rows, tile.first_row + tile_rows) - 1;
  std::int64_t keys = 0;
  for (std::int32_t i = program.op_begin; i < program.op_end; ++i) {
    const TileOp& op = image.part<TileOp>(image.ops)[i];
    if (op.kind != TileOpKind::block && op.kind != TileOpKind::accumulate) continue;
    const std::int64_t num_keys = image.part<KeyBlock>(image.kv_blocks)[op.kv_block].num_keys;
    keys += std::clamp<std::int64_t>(op.first_row_limit + last_row, 0, num_keys);
  }
  return keys;
}

std::vector<RowTile> tiles_of(const std::vector<TileProgram>& programs, int tile_rows) {
  std::vector<RowTile> tiles;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    for (std::int32_t row = 0; row < programs[i].num_rows; row += tile_rows)
      tiles.push_back({narrow<std::int32_t>(i), row});
  }
  return tiles;
}

void sort_by_work(const StepImage& image, std::vector<RowTile>& tiles, int tile_rows) {
  std::vector<std::pair<std::int64_t, RowTile>> keyed;
  for (const RowTile& tile : tiles) keyed.emplace_back(work_of(image, tile, tile_rows), tile);
  std::stable_sort(keyed.begin(), keyed.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (std::size_t i = 0; i < tiles.size(); ++i) tiles[i] = keyed[i].second;
}

}  // namespace

std::vector<TileOp> lower(std::span<const StateOp> ops, std::span<const KvBlock> kv_blocks) {
  Lowering lowering(kv_blocks);
  for (const StateOp& op : ops) lowering.add(op);
  return lowering.finish();
}

std::vector<std::byte> make_step_image(const ForwardArgs& args, int tile_rows) {
  std::vector<TileProgram> programs;
  std::vector<TileOp> ops;
  for (const QueryProgram& program : args.programs) {
    const std::vector<TileOp> lowered = lower(program.ops, args.kv_blocks);
    const auto begin = narrow<std::int32_t>(ops.size());
    ops.insert(ops.end(), lowered.begin(), lowered.end());
    programs.push_back({program.row_begin, narrow<std::int32_t>(program.num_rows), begin,
                        narrow<std::int32_t>(ops.size())});
  }
  std::vector<KeyBlock> kv_blocks;
  for (const KvBlock& block : args.kv_blocks) kv_blocks.push_back({block.packed, block.num_keys});
  std::vector<RowTile> tiles = tiles_of(programs, tile_rows);

  ImageParts parts(sizeof(StepImage));
  StepImage header;
  header.num_tiles = narrow<std::int32_t>(tiles.size());
  header.num_programs = narrow<std::int32_t>(programs.size());
  header.num_ops = narrow<std::int32_t>(ops.size());
  header.num_kv_blocks = narrow<std::int32_t>(kv_blocks.size());
  header.tiles = parts.reserve(tiles);
  header.programs = parts.reserve(programs);
  header.ops = parts.reserve(ops);
  header.kv_blocks = parts.reserve(kv_blocks);
  parts.begin(header);
  parts.write(header.programs, programs);
  parts.write(header.ops, ops);
  parts.write(header.kv_blocks, kv_blocks);
  sort_by_work(parts.header<StepImage>(), tiles, tile_rows);
  parts.write(header.tiles, tiles);
  return parts.take();
}

}  // namespace cpattn::cuda
