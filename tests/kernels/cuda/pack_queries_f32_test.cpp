#include "kernels/cuda/pack_queries_f32.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/f32_form.h"
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

constexpr std::int64_t kHeads = 2, kRows = 137;

/// Two chunks of a shard, 3 rows before the first, whose rows 1 mod 5 saw no key.
struct Inputs {
  HostTensor q, out, dout;
  std::vector<float> lse, dlse;
  std::vector<PackChunk> chunks{{3, 70, 0}, {73, 64, 0}};
  KernelProblem problem;

  Inputs(DType dout_dtype, std::int64_t dim, std::int64_t value_dim, bool has_dlse)
      : q(DType::f32, {kRows, kHeads, dim}, {kHeads * (dim + 3) + 1, dim + 3, 1}),
        out(dout_dtype, {kRows, kHeads, value_dim}),
        dout(dout_dtype, {kRows, kHeads, value_dim}, {value_dim, kRows * value_dim + 5, 1}),
        problem{
            .shape = {kHeads, 1, dim, value_dim, 1.0}, .dtype = DType::f32, .max_chunk_rows = 70} {
    q.fill_normal(1);
    out.fill_normal(2);
    dout.fill_normal(3);
    for (std::int64_t row = 0; row < kRows; ++row)
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
    place_chunks();
  }

  void place_chunks() {
    std::size_t bytes = 0;
    for (PackChunk& chunk : chunks) {
      chunk.offset = bytes;
      bytes += f32::packed_query_bytes(problem, chunk.num_keys);
    }
  }

  static bool is_used(std::int64_t row) { return row % 5 != 1; }
};

class PackQueriesF32 : public HostTest {
 protected:
  Buffer pack(const Inputs& in) {
    const PackChunk& last = in.chunks.back();
    Buffer packed(last.offset + f32::packed_query_bytes(in.problem, last.num_keys));
    std::fill_n(packed.data(), packed.size_bytes(), std::byte{0xff});
    f32::pack_queries(
        {.problem = in.problem,
         .q = in.q.view(),
         .out = in.out.view(),
         .dout = in.dout.view(),
         .lse = {in.lse.data(), {kRows, kHeads}, {kHeads, 1}},
         .dlse = {in.dlse.empty() ? nullptr : in.dlse.data(), {kRows, kHeads}, {kHeads, 1}},
         .chunks = in.chunks,
         .packed = packed.data(),
         .stream = {static_cast<cudaStream_t>(&executor_)}});
    return packed;
  }

  /// Row `row` of a head of a chunk.
  static void expect_row(const Inputs& in, const Buffer& packed, const PackChunk& chunk,
                         std::int64_t head, std::int64_t row) {
    const f32::RowForm form = f32::form_of(in.problem.shape);
    const f32::QueryParts parts = f32::query_parts(form, kHeads, chunk.num_keys);
    const auto* floats = reinterpret_cast<const float*>(packed.data() + chunk.offset);
    const std::int64_t local = chunk.row_begin + row, place = head * chunk.num_keys + row;
    const bool is_used = Inputs::is_used(local);
    float delta = 0.0f;
    for (int d = 0; d < f32::row_floats(form.dim); ++d) {
      const float expected = is_used && d < form.dim ? in.q.at(local, head, d) : 0.0f;
      ASSERT_EQ(floats[form.first_floats(place) + d], expected) << d;
    }
    for (int d = 0; d < f32::row_floats(form.value_dim); ++d) {
      const float expected = is_used && d < form.value_dim ? in.dout.at(local, head, d) : 0.0f;
      ASSERT_EQ(floats[parts.dout + form.second_floats(place) + d], expected) << d;
      if (is_used && d < form.value_dim)
        delta = std::fmaf(expected, in.out.at(local, head, d), delta);
    }
    const auto at = static_cast<std::size_t>(local * kHeads + head);
    if (is_used && !in.dlse.empty()) delta -= in.dlse[at];
    EXPECT_EQ(floats[parts.delta + place], delta);
    EXPECT_EQ(floats[parts.lse + place],
              static_cast<float>(static_cast<double>(in.lse[at]) * kLog2e));
  }

  static void expect_all_rows(const Inputs& in, const Buffer& packed) {
    for (const PackChunk& chunk : in.chunks)
      for (std::int64_t head = 0; head < kHeads; ++head)
        for (std::int64_t row = 0; row < chunk.num_keys; ++row) {
          SCOPED_TRACE(chunk.row_begin + row);
          expect_row(in, packed, chunk, head, row);
        }
  }
};

TEST_F(PackQueriesF32, EveryNumberOfTheForm) {
  for (const Inputs& in : {Inputs(DType::f32, 40, 24, false), Inputs(DType::bf16, 64, 65, true),
                           Inputs(DType::f16, 7, 128, true)}) {
    SCOPED_TRACE(in.problem.shape.value_dim);
    in_all_modes([&] { expect_all_rows(in, pack(in)); });
  }
}

TEST_F(PackQueriesF32, ManyChunksTakeSeveralLaunches) {
  Inputs in(DType::f32, 8, 8, true);
  in.chunks.clear();
  for (std::int64_t row = 0; row < kRows; ++row) in.chunks.push_back({row, 1, 0});
  in.chunks.push_back({kRows, 0, 0});  // holds nothing
  in.place_chunks();
  expect_all_rows(in, pack(in));
}

}  // namespace
}  // namespace cpattn::cuda
