#include "kernels/cuda/states.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/cpu/tile_kernels.h"
#include "kernels/lse.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using cpu::kQueryTile;
using testing::random_integer;
using testing::random_normal;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A slot in memory of its own.
struct Slot {
  explicit Slot(const StateShape& shape)
      : memory(state_slot_bytes(shape)), at(state_slot_at(shape, memory.data())) {}
  Buffer memory;
  StateSlot at;
};

/// States as merges meet them: a few empty, some with equal m, some far apart, zeros of both signs.
void fill(const StateShape& shape, std::uint64_t seed, const StateSlot& slot) {
  for (std::int64_t i = 0; i < shape.num_states(); ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    const std::int64_t kind = random_integer(seed, index, 0, 9);
    const bool is_empty = kind == 0;
    slot.m[i] = is_empty ? -kInfinity : kind == 1 ? 3.5f : 20.0f * random_normal(seed + 1, index);
    if (kind == 2) slot.m[i] = 1e4f;
    slot.l[i] = is_empty ? 0.0f : 1.0f + std::abs(random_normal(seed + 2, index));
    for (std::int64_t d = 0; d < shape.padded_dim(); ++d) {
      const std::int64_t place = i * shape.padded_dim() + d;
      float o = random_normal(seed + 3, static_cast<std::uint64_t>(place));
      if (kind == 3) o = d % 2 == 0 ? -0.0f : 0.0f;
      if (d >= shape.value_dim) o = std::numeric_limits<float>::quiet_NaN();  // surplus
      slot.o[place] = is_empty ? 0.0f : o;
    }
  }
}

/// The CPU kernels on up to 48 rows of one head: slots 0 and 1 in, slot 2 or out and lse back.
class CpuTile {
 public:
  CpuTile(const StateShape& shape, std::int64_t head, std::int64_t first_row)
      : shape_(shape),
        head_(head),
        first_row_(first_row),
        num_rows_(std::min(shape.num_rows - first_row, kQueryTile)),
        slot_floats_(cpu::state_floats(shape.value_dim)),
        slots_(static_cast<std::size_t>(3 * slot_floats_) * sizeof(float)) {}

  void put(int slot, const StateSlot& from) const {
    for_each([&](std::int64_t row, std::int64_t state) {
      float* to = slot_at(slot) + row;
      to[0] = from.m[state];
      to[kQueryTile] = from.l[state];
      for (std::int64_t d = 0; d < shape_.value_dim; ++d) {
        to[(2 + d) * kQueryTile] = from.o[state * shape_.padded_dim() + d];
      }
    });
  }

  void expect_equal(int slot, const StateSlot& given) const {
    for_each([&](std::int64_t row, std::int64_t state) {
      const float* expected = slot_at(slot) + row;
      expect_bits(given.m[state], expected[0]);
      expect_bits(given.l[state], expected[kQueryTile]);
      for (std::int64_t d = 0; d < shape_.value_dim; ++d) {
        expect_bits(given.o[state * shape_.padded_dim() + d], expected[(2 + d) * kQueryTile]);
      }
    });
  }

  void run(const StateOp& op, DType out_dtype, std::byte* out, float* lse) const {
    const AttentionShape attention{shape_.num_heads, shape_.num_heads, 1, shape_.value_dim, 1.0};
    cpu::TileJob job;
    job.shape = &attention;
    job.ops = &op;
    job.num_ops = 1;
    job.num_rows = num_rows_;
    job.carried = slots_.as<float>();
    job.carried_slot = slot_floats_;
    job.out = out;
    job.out_row_bytes = shape_.value_dim * static_cast<std::int64_t>(size_of(out_dtype));
    job.out_dtype = out_dtype;
    job.lse = lse;
    job.lse_row_stride = 1;
    cpu::generic_tile_kernels().run_tile(job, {});
  }

  /// visit(row of the tile, state).
  void for_each(const std::function<void(std::int64_t, std::int64_t)>& visit) const {
    for (std::int64_t row = 0; row < num_rows_; ++row) {
      visit(row, head_ * shape_.num_rows + first_row_ + row);
    }
  }

  static void expect_bits(float given, float expected) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(given), std::bit_cast<std::uint32_t>(expected))
        << given << " for " << expected;
  }

 private:
  float* slot_at(int slot) const { return slots_.as<float>() + slot * slot_floats_; }

  StateShape shape_;
  std::int64_t head_, first_row_, num_rows_, slot_floats_;
  Buffer slots_;
};

template <class Visit>
void for_each_tile(const StateShape& shape, const Visit& visit) {
  for (std::int64_t head = 0; head < shape.num_heads; ++head) {
    for (std::int64_t row = 0; row < shape.num_rows; row += kQueryTile) {
      visit(CpuTile(shape, head, row), head, row);
    }
  }
}

constexpr StateShape kShapes[] = {{1, 1, 1},    {3, 31, 3},   {2, 48, 64},
                                  {1, 130, 80}, {2, 49, 128}, {1, 17, 256}};

class States : public HostTest {};

TEST_F(States, MergeHasTheBitsOfTheCpuKernels) {
  for (const StateShape& shape : kShapes) {
    const Slot left(shape), right(shape), dst(shape);
    in_all_modes([&] {
      fill(shape, 10, left.at);
      fill(shape, 20, right.at);
      merge_states(shape, left.at, right.at, dst.at, &executor_);
      for_each_tile(shape, [&](const CpuTile& tile, std::int64_t, std::int64_t) {
        tile.put(0, left.at);
        tile.put(1, right.at);
        tile.run({.kind = StateOpKind::merge, .dst = 2, .left = 0, .right = 1}, DType::f32, nullptr,
                 nullptr);
        tile.expect_equal(2, dst.at);
      });
    });
  }
}

TEST_F(States, MergeMayWriteToEitherSide) {
  for (const StateShape& shape : kShapes) {
    const Slot left(shape), right(shape), dst(shape), other(shape);
    in_all_modes([&] {
      const auto expect_same = [&](const StateSlot& given) {
        EXPECT_EQ(std::memcmp(given.m, dst.at.m, sizeof(float) * 2 * shape.num_states()), 0);
        for (std::int64_t i = 0; i < shape.num_states() * shape.padded_dim(); ++i) {
          if (i % shape.padded_dim() < shape.value_dim) {
            CpuTile::expect_bits(given.o[i], dst.at.o[i]);
          }
        }
      };
      fill(shape, 30, left.at);
      fill(shape, 40, right.at);
      merge_states(shape, left.at, right.at, dst.at, &executor_);
      std::memcpy(other.memory.data(), left.memory.data(), other.memory.size_bytes());
      merge_states(shape, other.at, right.at, other.at, &executor_);
      expect_same(other.at);
      std::memcpy(other.memory.data(), right.memory.data(), other.memory.size_bytes());
      merge_states(shape, left.at, other.at, other.at, &executor_);
      expect_same(other.at);
    });
  }
}

TEST_F(States, FinalizeHasTheBitsOfTheCpuKernels) {
  for (const StateShape& shape : kShapes) {
    const Slot slot(shape);
    fill(shape, 50, slot.at);
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      // The caller's [rows, heads, channels], with a gap behind each row.
      const std::int64_t head_stride = shape.value_dim;
      const std::int64_t row_stride = shape.num_heads * head_stride + 5;
      const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
      in_all_modes([&] {
        std::vector<std::byte> out(static_cast<std::size_t>(shape.num_rows * row_stride * size));
        std::vector<float> lse(static_cast<std::size_t>(shape.num_states()), -1.0f);
        finalize_states(
            shape, slot.at,
            {out.data(), dtype, row_stride, head_stride, lse.data(), shape.num_heads, 1},
            &executor_);
        for_each_tile(shape, [&](const CpuTile& tile, std::int64_t head, std::int64_t first_row) {
          std::vector<std::byte> expected(
              static_cast<std::size_t>(kQueryTile * shape.value_dim * size));
          std::vector<float> expected_lse(kQueryTile);
          tile.put(0, slot.at);
          tile.run({.kind = StateOpKind::finalize, .left = 0}, dtype, expected.data(),
                   expected_lse.data());
          tile.for_each([&](std::int64_t row, std::int64_t) {
            const std::byte* given =
                out.data() + ((first_row + row) * row_stride + head * head_stride) * size;
            EXPECT_EQ(std::memcmp(given, expected.data() + row * shape.value_dim * size,
                                  static_cast<std::size_t>(shape.value_dim * size)),
                      0)
                << "row " << first_row + row << " of head " << head;
            // The host has one logarithm for both; a device may differ in the last place.
            CpuTile::expect_bits(
                lse[static_cast<std::size_t>((first_row + row) * shape.num_heads + head)],
                expected_lse[static_cast<std::size_t>(row)]);
          });
        });
      });
    }
  }
}

TEST_F(States, RowsWithoutKeysAreZeroAndMinusInfinity) {
  const StateShape shape{2, 5, 7};
  std::vector<bf16> out(2 * 5 * 7, bf16{0x1234});
  std::vector<float> lse(10, 1.0f);
  finalize_empty(shape, {out.data(), DType::bf16, 14, 7, lse.data(), 2, 1}, &executor_);
  for (const bf16 value : out) EXPECT_EQ(value.bits, 0);
  for (const float value : lse) EXPECT_EQ(value, -kInfinity);
}

TEST_F(States, HeadMaximaAreKeptAcrossSlots) {
  const StateShape shape{3, 700, 4};
  const Slot first(shape), second(shape);
  in_all_modes([&] {
    fill(shape, 60, first.at);
    fill(shape, 70, second.at);
    for (std::int64_t row = 0; row < shape.num_rows; ++row) {
      first.at.m[shape.num_rows + row] = second.at.m[shape.num_rows + row] = -kInfinity;
    }
    second.at.m[2 * shape.num_rows + 650] = 2e4f;
    std::vector<float> maxima(3, -kInfinity);
    record_head_maxima(shape, first.at, maxima.data(), &executor_);
    record_head_maxima(shape, second.at, maxima.data(), &executor_);
    const auto natural = [](float m) { return static_cast<float>(static_cast<double>(m) * kLn2); };
    const float largest = std::max(*std::max_element(first.at.m, first.at.m + shape.num_rows),
                                   *std::max_element(second.at.m, second.at.m + shape.num_rows));
    CpuTile::expect_bits(maxima[0], natural(largest));
    EXPECT_EQ(maxima[1], -kInfinity);  // nothing observed
    CpuTile::expect_bits(maxima[2], natural(2e4f));

    first.at.m[699] = std::numeric_limits<float>::quiet_NaN();
    record_head_maxima(shape, first.at, maxima.data(), &executor_);
    record_head_maxima(shape, second.at, maxima.data(), &executor_);
    EXPECT_TRUE(std::isnan(maxima[0]));
    CpuTile::expect_bits(maxima[2], natural(2e4f));
  });
}

}  // namespace
}  // namespace cpattn::cuda
