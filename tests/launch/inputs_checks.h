// What both kinds of inputs are tested for: slices equal the whole, bad requests are refused.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "launch/inputs.h"
#include "src/base/error.h"

namespace cpattn {

inline constexpr TensorRole kInputRoles[] = {TensorRole::q, TensorRole::k, TensorRole::v};
inline constexpr TensorRole kRoles[] = {TensorRole::q, TensorRole::k, TensorRole::v,
                                        TensorRole::dout, TensorRole::dlse};

inline std::array<std::int64_t, 3> extent_of(const InputInfo& info, TensorRole role) {
  const AttentionShape& shape = info.shape;
  if (role == TensorRole::q) return {info.batch.q_rows, shape.num_heads, shape.head_dim};
  if (role == TensorRole::dout) return {info.batch.q_rows, shape.num_heads, shape.value_dim};
  if (role == TensorRole::dlse) return {info.batch.q_rows, shape.num_heads, 1};
  const std::int64_t dim = role == TensorRole::k ? shape.head_dim : shape.value_dim;
  return {info.batch.kv_rows, shape.num_kv_heads, dim};
}

/// Rows [begin, begin + count) of a tensor as bytes.
inline std::string rows_of(const InputSource& source, TensorRole role, DType dtype,
                           std::int64_t begin, std::int64_t count) {
  auto extent = extent_of(source.info(), role);
  extent[0] = count;
  std::string bytes(static_cast<std::size_t>(count * extent[1] * extent[2]) * size_of(dtype), '#');
  source.read(role, begin, contiguous_tensor(bytes.data(), dtype, extent));
  return bytes;
}

inline std::vector<float> floats_of(const InputSource& source, TensorRole role) {
  const auto extent = extent_of(source.info(), role);
  std::vector<float> values(static_cast<std::size_t>(extent[0] * extent[1] * extent[2]));
  source.read(role, 0, contiguous_tensor(values.data(), DType::f32, extent));
  return values;
}

/// Any slice, at any stride, is the same rows of the whole; nothing beside them is written.
inline void expect_slices_equal_whole(const InputSource& source) {
  for (const TensorRole role : kRoles) {
    const auto [rows, heads, dim] = extent_of(source.info(), role);
    for (const auto& dtype : EnumNames<DType>::kValues) {
      const std::string whole = rows_of(source, role, dtype.value, 0, rows);
      const std::size_t row_bytes = whole.size() / static_cast<std::size_t>(rows);
      for (const std::int64_t begin : {std::int64_t{0}, rows / 3, rows - 1, rows}) {
        for (std::int64_t count = 0; count <= rows - begin; count += 1 + rows / 5) {
          EXPECT_EQ(rows_of(source, role, dtype.value, begin, count),
                    whole.substr(static_cast<std::size_t>(begin) * row_bytes,
                                 static_cast<std::size_t>(count) * row_bytes))
              << name_of(role) << " " << dtype.name << " rows " << begin << " + " << count;
        }
      }
      // One row into a head-major layout with gaps.
      const std::size_t size = size_of(dtype.value);
      std::string spread(static_cast<std::size_t>(heads * (dim + 3)) * size, '#');
      source.read(role, rows - 1,
                  AnyTensor{spread.data(), dtype.value, {1, heads, dim}, {1, dim + 3, 1}});
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::size_t at = static_cast<std::size_t>(head * (dim + 3)) * size;
        const std::size_t bytes = static_cast<std::size_t>(dim) * size;
        EXPECT_EQ(
            spread.substr(at, bytes),
            whole.substr(whole.size() - row_bytes + static_cast<std::size_t>(head) * bytes, bytes));
        EXPECT_EQ(spread.substr(at + bytes, 3 * size), std::string(3 * size, '#'));
      }
    }
  }
}

inline void expect_bad_reads_refused(const InputSource& source) {
  std::vector<float> room(1 << 16);
  for (const TensorRole role : kRoles) {
    const auto [rows, heads, dim] = extent_of(source.info(), role);
    const auto read = [&, role = role](std::int64_t begin, std::array<std::int64_t, 3> shape) {
      source.read(role, begin, contiguous_tensor(room.data(), DType::f32, shape));
    };
    EXPECT_NO_THROW(read(rows, {0, heads, dim}));
    EXPECT_THROW(read(rows, {1, heads, dim}), InvalidArgument);
    EXPECT_THROW(read(-1, {1, heads, dim}), InvalidArgument);
    EXPECT_THROW(read(rows + 1, {0, heads, dim}), InvalidArgument);
    EXPECT_THROW(read(1, {std::numeric_limits<std::int64_t>::max(), heads, dim}), InvalidArgument);
    EXPECT_THROW(read(0, {1, heads + 1, dim}), InvalidArgument);
    EXPECT_THROW(read(0, {1, heads, dim + 1}), InvalidArgument);
    if (dim == 1) continue;  // one channel has no stride
    AnyTensor strided = contiguous_tensor(room.data(), DType::f32, {1, heads, dim});
    strided.strides[2] = 2;
    EXPECT_THROW(source.read(role, 0, strided), InvalidArgument);
  }
}

}  // namespace cpattn
