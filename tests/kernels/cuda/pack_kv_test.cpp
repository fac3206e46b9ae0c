#include "kernels/cuda/pack_kv.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/tile_form.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/host_tensor.h"

namespace cpattn::cuda {
namespace {

using testing::HostTensor;

class PackKv : public HostTest {
 protected:
  Stream stream() { return {static_cast<cudaStream_t>(&executor_)}; }
};

/// Element (row, column) of panels that begin at `tile`.
std::uint16_t packed_bits(const std::byte* tile, std::int64_t row, std::int64_t column) {
  std::uint16_t bits = 0;
  const std::byte* place =
      tile + panel_offset(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(column));
  std::copy_n(place, sizeof(bits), reinterpret_cast<std::byte*>(&bits));
  return bits;
}

/// All elements of one tensor in one chunk, padding included.
void expect_tiles(const HostTensor& tensor, const PackChunk& chunk, const std::byte* head_begin,
                  std::int64_t tile_bytes, std::int64_t head, int panels) {
  for (std::int64_t key = 0; key < num_tiles(chunk.num_keys) * kTileRows; ++key)
    for (std::int64_t d = 0; d < std::int64_t{panels} * kPanelColumns; ++d) {
      const bool is_inside = key < chunk.num_keys && d < tensor.shape()[2];
      const std::uint32_t expected =
          is_inside ? tensor.bits_at(chunk.row_begin + key, head, d) : 0u;
      ASSERT_EQ(packed_bits(head_begin + key / kTileRows * tile_bytes, key % kTileRows, d),
                expected)
          << "key " << key << " head " << head << " channel " << d;
    }
}

struct Case {
  std::int64_t heads, dim, value_dim;
  std::int64_t head_gap, row_gap;  ///< elements
  std::vector<std::int64_t> chunks;
};

class PackKvCases : public PackKv {
 protected:
  void expect_packed(const Case& it, DType dtype) {
    std::int64_t rows = 3;  // ahead of the first chunk
    for (const std::int64_t keys : it.chunks) rows += keys;
    const auto tensor = [&](std::int64_t dim, std::uint64_t seed) {
      const std::int64_t head_stride = dim + it.head_gap;
      HostTensor result(dtype, {rows, it.heads, dim},
                        {it.heads * head_stride + it.row_gap, head_stride, 1});
      return result.fill_normal(seed);
    };
    const HostTensor k = tensor(it.dim, 1), v = tensor(it.value_dim, 2);
    const KernelProblem problem{.shape = {it.heads, it.heads, it.dim, it.value_dim, 1.0},
                                .dtype = dtype};
    std::vector<PackChunk> chunks;
    std::size_t bytes = 0;
    std::int64_t row = 3;
    for (const std::int64_t keys : it.chunks) {
      chunks.push_back({row, keys, bytes});
      bytes += packed_kv_bytes(problem, keys);
      row += keys;
    }
    in_all_modes([&] {
      const Buffer packed(bytes);
      std::fill_n(packed.data(), bytes, std::byte{0xff});
      pack_kv({.problem = problem,
               .k = k.view(),
               .v = v.view(),
               .chunks = chunks,
               .packed = packed.data(),
               .stream = stream()});
      const KvForm form{num_panels(it.dim), num_panels(it.value_dim)};
      for (const PackChunk& chunk : chunks)
        for (std::int64_t head = 0; head < it.heads; ++head) {
          const std::byte* begin =
              packed.data() + chunk.offset + head * form.head_bytes(chunk.num_keys);
          expect_tiles(k, chunk, begin, form.tile_bytes(), head, form.k_panels);
          expect_tiles(v, chunk, begin + form.k_tile_bytes(), form.tile_bytes(), head,
                       form.v_panels);
        }
    });
  }
};

TEST_F(PackKvCases, AnyShapeAndStrides) {
  expect_packed({1, 64, 64, 0, 0, {64}}, DType::bf16);        // one whole tile
  expect_packed({2, 128, 64, 0, 0, {63, 65}}, DType::f16);    // aligned pieces
  expect_packed({2, 1, 70, 0, 1, {1, 0, 129}}, DType::bf16);  // odd strides: element by element
  expect_packed({1, 80, 136, 8, 16, {5}}, DType::f16);        // aligned rows, last panel in part
  expect_packed({1, 65, 64, 7, 0, {70}}, DType::bf16);        // last piece in part
}

TEST_F(PackKvCases, MoreChunksThanALaunchTakes) {
  expect_packed({1, 8, 8, 0, 0, std::vector<std::int64_t>(150, 2)}, DType::bf16);
}

TEST_F(PackKv, NothingIsLaunchedForNothing) {
  const HostTensor k(DType::bf16, {0, 1, 8});
  const PackChunk empty{0, 0, 0};
  const Buffer packed(64);

  pack_kv({.problem = {.shape = {1, 1, 8, 8, 1.0}, .dtype = DType::bf16},
           .k = k.view(),
           .v = k.view(),
           .chunks = {&empty, 1},
           .packed = packed.data(),
           .stream = stream()});

  EXPECT_EQ(executor_.counters().blocks, 0u);
}

TEST_F(PackKv, WhatDoesNotFitIsRefused) {
  const HostTensor k(DType::bf16, {4, 1, 8}), wide(DType::bf16, {4, 1, 300});
  const PackChunk chunk{0, 4, 0};
  const Buffer packed(1 << 17);
  const PackKvArgs good{.problem = {.shape = {1, 1, 8, 8, 1.0}, .dtype = DType::bf16},
                        .k = k.view(),
                        .v = k.view(),
                        .chunks = {&chunk, 1},
                        .packed = packed.data(),
                        .stream = stream()};
  const auto refuses = [&](auto&& change) {
    PackKvArgs args = good;
    change(args);
    EXPECT_THROW(pack_kv(args), InvalidArgument);
    EXPECT_EQ(executor_.counters().blocks, 0u);
  };
  refuses([](PackKvArgs& args) { args.packed += 32; });
  refuses([](PackKvArgs& args) { args.k.dtype = DType::f16; });
  refuses([](PackKvArgs& args) { args.v.strides[2] = 2; });
  refuses([](PackKvArgs& args) { args.v.shape[1] = 2; });
  refuses([&](PackKvArgs& args) {
    args.problem.shape.head_dim = 300;
    args.k = wide.view();
  });
  EXPECT_NO_THROW(pack_kv(good));
}

}  // namespace
}  // namespace cpattn::cuda
