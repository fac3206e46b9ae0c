#include "kernels/cuda/pack_queries.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/tile_form.h"
#include "kernels/lse.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/host_tensor.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using testing::HostTensor;
using testing::kInf;
using testing::kNan;

constexpr std::int64_t kHeads = 2;

/// Two chunks of a shard, 3 rows before the first, whose rows 1 mod 5 saw no key.
struct Inputs {
  HostTensor q, out, dout;
  std::vector<float> lse, dlse;
  std::vector<PackChunk> chunks{{3, 70, 0}, {73, 64, 0}};
  KernelProblem problem;

  Inputs(DType dtype, DType dout_dtype, std::int64_t dim, std::int64_t value_dim, bool has_dlse)
      : q(dtype, {137, kHeads, dim}, {kHeads * (dim + 3) + 1, dim + 3, 1}),
        out(dout_dtype, {137, kHeads, value_dim}),
        dout(dout_dtype, {137, kHeads, value_dim}, {value_dim, 137 * value_dim + 5, 1}),
        problem{.shape = {kHeads, 1, dim, value_dim, 1.0}, .dtype = dtype, .max_chunk_rows = 70} {
    q.fill_normal(1);
    out.fill_normal(2);
    dout.fill_normal(3);
    for (std::int64_t row = 0; row < 137; ++row)
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const auto seed = static_cast<std::uint64_t>(row * kHeads + head);
        lse.push_back(is_used(row) ? 10.0f * testing::random_normal(4, seed) : -kInf);
        if (has_dlse) dlse.push_back(testing::random_normal(5, seed));
        if (is_used(row)) continue;
        for (std::int64_t d = 0; d < dim; ++d) q.set(row, head, d, kNan);
        for (std::int64_t d = 0; d < value_dim; ++d) {
          out.set(row, head, d, kNan);
          dout.set(row, head, d, kInf);
        }
      }
    std::size_t bytes = 0;
    for (PackChunk& chunk : chunks) {
      chunk.offset = bytes;
      bytes += packed_query_bytes(problem, chunk.num_keys);
    }
  }

  static bool is_used(std::int64_t row) { return row % 5 != 1; }
};

/// The packed tile of a row and its place in there.
class PackedRow {
 public:
  PackedRow(const Inputs& in, const std::byte* packed, const PackChunk& chunk, std::int64_t head,
            std::int64_t row)
      : form_{num_panels(in.problem.shape.head_dim), num_panels(in.problem.shape.value_dim)},
        tile_(packed + chunk.offset + head * form_.head_bytes(chunk.num_keys) +
              row / kTileRows * form_.tile_bytes()),
        row_(static_cast<std::uint32_t>(row % kTileRows)) {}

  std::uint32_t q(std::int64_t d) const { return bits(0, d); }
  std::uint32_t dout(std::int64_t d) const { return bits(form_.q_panels * kPanelBytes, d); }
  float lse() const { return scalars()[row_]; }
  float delta() const { return scalars()[kTileRows + row_]; }
  const QueryForm& form() const { return form_; }

 private:
  std::uint32_t bits(int panels, std::int64_t d) const {
    std::uint16_t value = 0;
    std::copy_n(tile_ + panels + panel_offset(row_, static_cast<std::uint32_t>(d)), sizeof(value),
                reinterpret_cast<std::byte*>(&value));
    return value;
  }
  const float* scalars() const {
    return reinterpret_cast<const float*>(tile_ + form_.panel_bytes());
  }

  QueryForm form_;
  const std::byte* tile_;
  std::uint32_t row_;
};

class PackQueries : public HostTest {
 protected:
  static Buffer pack(const Inputs& in, cuda_host::Executor& executor) {
    const PackChunk& last = in.chunks.back();
    Buffer packed(last.offset + packed_query_bytes(in.problem, last.num_keys));
    std::fill_n(packed.data(), packed.size_bytes(), std::byte{0xff});
    pack_queries({.problem = in.problem,
                  .q = in.q.view(),
                  .out = in.out.view(),
                  .dout = in.dout.view(),
                  .lse = {in.lse.data(), {137, kHeads}, {kHeads, 1}},
                  .dlse = {in.dlse.empty() ? nullptr : in.dlse.data(), {137, kHeads}, {kHeads, 1}},
                  .chunks = in.chunks,
                  .packed = packed.data(),
                  .stream = {static_cast<cudaStream_t>(&executor)}});
    return packed;
  }

  static void expect_row(const Inputs& in, const PackedRow& packed, std::int64_t row,
                         std::int64_t head, bool is_used) {
    const AttentionShape& shape = in.problem.shape;
    float delta = 0.0f;
    for (std::int64_t d = 0; d < std::int64_t{packed.form().q_panels} * kPanelColumns; ++d) {
      const bool is_inside = is_used && d < shape.head_dim;
      ASSERT_EQ(packed.q(d), is_inside ? in.q.bits_at(row, head, d) : 0u) << d;
    }
    for (std::int64_t d = 0; d < std::int64_t{packed.form().dout_panels} * kPanelColumns; ++d) {
      float rounded = 0.0f;
      const bool is_inside = is_used && d < shape.value_dim;
      if (in.problem.dtype == DType::bf16) {
        const bf16 value = to_bf16(is_inside ? in.dout.at(row, head, d) : 0.0f);
        rounded = to_float(value);
        ASSERT_EQ(packed.dout(d), value.bits) << d;
      } else {
        const f16 value = to_f16(is_inside ? in.dout.at(row, head, d) : 0.0f);
        rounded = to_float(value);
        ASSERT_EQ(packed.dout(d), value.bits) << d;
      }
      if (is_inside) delta = std::fmaf(rounded, in.out.at(row, head, d), delta);
    }
    const auto place = static_cast<std::size_t>(row * kHeads + head);
    if (is_used && !in.dlse.empty()) delta -= in.dlse[place];
    EXPECT_EQ(packed.delta(), delta);
    EXPECT_EQ(packed.lse(),
              is_used ? static_cast<float>(static_cast<double>(in.lse[place]) * kLog2e) : -kInf);
  }
};

TEST_F(PackQueries, EveryByteOfTheForm) {
  for (const Inputs& in : {Inputs(DType::bf16, DType::bf16, 40, 24, false),
                           Inputs(DType::bf16, DType::f32, 64, 65, true),
                           Inputs(DType::f16, DType::f32, 7, 128, true)}) {
    SCOPED_TRACE(in.problem.shape.value_dim);
    in_all_modes([&] {
      const Buffer packed = pack(in, executor_);
      for (const PackChunk& chunk : in.chunks)
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (std::int64_t row = 0; row < num_tiles(chunk.num_keys) * kTileRows; ++row) {
            const std::int64_t local = chunk.row_begin + row;
            SCOPED_TRACE(local);
            const bool is_used = row < chunk.num_keys && Inputs::is_used(local);
            expect_row(in, PackedRow(in, packed.data(), chunk, head, row), local, head, is_used);
          }
    });
  }
}

TEST_F(PackQueries, ManyChunksTakeSeveralLaunches) {
  Inputs in(DType::f16, DType::f16, 8, 8, false);
  in.chunks.clear();
  for (std::int64_t row = 0; row < 137; ++row) {
    in.chunks.push_back(
        {row, 1, static_cast<std::size_t>(row) * packed_query_bytes(in.problem, 1)});
  }
  const Buffer packed = pack(in, executor_);
  for (const PackChunk& chunk : in.chunks) {
    const std::int64_t row = chunk.row_begin;
    expect_row(in, PackedRow(in, packed.data(), chunk, 1, 0), row, 1, Inputs::is_used(row));
  }
}

}  // namespace
}  // namespace cpattn::cuda
