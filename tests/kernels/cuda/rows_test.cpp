#include "kernels/cuda/rows.h"

#include <bit>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cpu/gradient_kernels.h"
#include "kernels/cpu/packed_queries.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using testing::random_integer;
using testing::random_normal;

class Rows : public HostTest {};

/// Ranges that deal rows [0, n) of one side in pieces to a shuffled place on the other.
std::vector<RowRange> deal(std::int64_t num_rows, std::int64_t num_ranges) {
  std::vector<RowRange> ranges;
  for (std::int64_t i = 0; i < num_ranges; ++i) {
    const std::int64_t begin = num_rows * i / num_ranges, end = num_rows * (i + 1) / num_ranges;
    // Pieces from the back to the front: where they come from is where they would be if reversed.
    ranges.push_back({num_rows - end, begin, begin});
  }
  return ranges;
}

TEST_F(Rows, AreGatheredByRanges) {
  struct Case {
    std::int64_t row_bytes, from_stride, to_stride, from_offset;
  };
  for (const Case& it : {Case{64, 64, 80, 0}, Case{528, 1024, 528, 0}, Case{20, 24, 20, 4},
                         Case{6, 6, 10, 2}, Case{7, 9, 7, 1}}) {
    for (const auto& [num_rows, num_ranges] : {std::pair{1, 1}, {9, 2}, {100, 7}, {64, 64}}) {
      SCOPED_TRACE(::testing::Message() << it.row_bytes << " bytes, " << num_rows << " rows");
      std::vector<std::byte> from(static_cast<std::size_t>(num_rows * it.from_stride + 16));
      for (std::size_t i = 0; i < from.size(); ++i) {
        from[i] = static_cast<std::byte>(testing::random_bits(1, i));
      }
      const std::vector<RowRange> ranges = deal(num_rows, num_ranges);
      in_all_modes([&] {
        std::vector<std::byte> to(static_cast<std::size_t>(num_rows * it.to_stride),
                                  std::byte{0x5a});
        copy_rows({from.data() + it.from_offset, it.from_stride, to.data(), it.to_stride,
                   it.row_bytes, ranges.data(), num_ranges, num_rows, Stream{&executor_}});
        std::vector<std::byte> expected(to.size(), std::byte{0x5a});
        for (std::size_t i = 0; i < ranges.size(); ++i) {
          const std::int64_t end = i + 1 < ranges.size() ? ranges[i + 1].first_row : num_rows;
          for (std::int64_t r = ranges[i].first_row; r < end; ++r) {
            const std::int64_t in_range = r - ranges[i].first_row;
            const std::byte* row =
                from.data() + it.from_offset + (ranges[i].from_row + in_range) * it.from_stride;
            std::copy(row, row + it.row_bytes,
                      expected.begin() + (ranges[i].to_row + in_range) * it.to_stride);
          }
        }
        EXPECT_EQ(to, expected);
      });
    }
  }
}

TEST_F(Rows, CopyOfNothingLaunchesNothing) {
  copy_rows({.stream = Stream{&executor_}});
  EXPECT_EQ(executor_.counters().blocks, 0u);
}

/// A tensor [rows, heads, dim] of any type with a gap behind each row.
struct Tensor {
  Tensor(DType dtype_, std::int64_t rows, std::int64_t heads_, std::int64_t dim_,
         std::uint64_t seed)
      : dtype(dtype_),
        heads(heads_),
        dim(dim_),
        row_stride(heads_ * dim_ + 8),
        memory(static_cast<std::size_t>(rows * row_stride) * size_of(dtype_)) {
    for (std::int64_t i = 0; i < rows * row_stride; ++i) {
      store_from_float(memory.data(), dtype, i, random_normal(seed, static_cast<std::uint64_t>(i)));
    }
  }
  TensorRows rows() const { return {memory.data(), dtype, row_stride, dim}; }
  AnyConstTensor view(std::int64_t num_rows) const {
    return {memory.data(), dtype, {num_rows, heads, dim}, {row_stride, dim, 1}};
  }
  DType dtype;
  std::int64_t heads, dim, row_stride;
  Buffer memory;
};

/// delta[head][row] as the CPU's packing of queries leaves it. f32 and f16 are the f32 engine, and
/// so is bf16 where the bf16 dot instruction is not used.
std::vector<float> cpu_delta(const Tensor& out, const Tensor& dout, std::int64_t num_rows,
                             const std::vector<float>& lse, const std::vector<float>& dlse) {
  const cpu::Engine engine = cpu::Engine::f32;
  const AttentionShape shape{out.heads, out.heads, 1, out.dim, 1.0};
  const KernelProblem problem{shape, DType::f32, num_rows, 1};
  const Tensor q(DType::f32, num_rows, out.heads, 1, 99);
  const Buffer packed(cpu::packed_query_bytes(problem, engine, num_rows));
  const PackChunk chunk{0, num_rows, 0};
  const std::array<std::int64_t, 2> scalars{num_rows, out.heads};
  PackQueriesArgs args{.problem = problem,
                       .q = q.view(num_rows),
                       .out = out.view(num_rows),
                       .dout = dout.view(num_rows),
                       .lse = contiguous_view(lse.data(), scalars),
                       .dlse = {},
                       .chunks = {&chunk, 1},
                       .packed = packed.data()};
  if (!dlse.empty()) args.dlse = contiguous_view(dlse.data(), scalars);
  cpu::pack_queries(args, cpu::generic_tile_kernels(), engine);
  const cpu::QueryTileLayout layout = cpu::query_tile_layout(engine, shape);
  std::vector<float> delta;
  for (std::int64_t head = 0; head < out.heads; ++head) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t tile = head * cpu::tiles_of(num_rows) + row / cpu::kQueryTile;
      delta.push_back(
          packed.as<float>()[tile * layout.total + layout.delta + row % cpu::kQueryTile]);
    }
  }
  return delta;
}

TEST_F(Rows, DeltaHasTheBitsOfTheCpuKernels) {
  struct Case {
    std::int64_t rows, heads, dim;
    DType out, dout;
  };
  for (const Case& it :
       {Case{1, 1, 1, DType::f32, DType::f32}, Case{33, 2, 64, DType::bf16, DType::bf16},
        Case{150, 3, 80, DType::f16, DType::f32}, Case{128, 1, 128, DType::f32, DType::bf16},
        Case{40, 2, 33, DType::bf16, DType::f16}}) {
    const Tensor out(it.out, it.rows, it.heads, it.dim, 1);
    const Tensor dout(it.dout, it.rows, it.heads, it.dim, 2);
    const auto scalars = static_cast<std::size_t>(it.rows * it.heads);
    std::vector<float> lse(scalars), dlse(scalars);
    for (std::size_t i = 0; i < scalars; ++i) {
      lse[i] = random_integer(3, i, 0, 7) == 0 ? -std::numeric_limits<float>::infinity()
                                               : random_normal(4, i);
      dlse[i] = random_normal(5, i);
    }
    for (const bool has_dlse : {false, true}) {
      const std::vector<float> expected =
          cpu_delta(out, dout, it.rows, lse, has_dlse ? dlse : std::vector<float>{});
      in_all_modes([&] {
        std::vector<float> delta(scalars, std::numeric_limits<float>::quiet_NaN());
        compute_delta({.num_rows = it.rows,
                       .num_heads = it.heads,
                       .value_dim = it.dim,
                       .out = out.rows(),
                       .dout = dout.rows(),
                       .lse = {lse.data(), it.heads, 1},
                       .dlse = {has_dlse ? dlse.data() : nullptr, it.heads, 1},
                       .delta = delta.data()},
                      &executor_);
        for (std::size_t i = 0; i < scalars; ++i) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(delta[i]),
                    std::bit_cast<std::uint32_t>(expected[i]))
              << "element " << i << ": " << delta[i] << " for " << expected[i];
        }
      });
    }
  }
}

}  // namespace
}  // namespace cpattn::cuda
