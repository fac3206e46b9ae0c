// Rows of tensors in device memory: copied by ranges (shards gathered and scattered), and delta of
// the backward.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/compat.h"
#include "src/base/dtype.h"

namespace cpattn::cuda {

/// Rows [from_row, from_row + n) go to [to_row, to_row + n); n is the next range's first_row less
/// this one's.
struct RowRange {
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;
  std::int64_t first_row = 0;  ///< how many rows the ranges before it have
};

/// Gather, scatter or both; `from` and `to` do not overlap. Any alignment; 16 bytes are fastest.
struct RowCopy {
  const std::byte* from = nullptr;
  std::int64_t from_stride_bytes = 0;
  std::byte* to = nullptr;
  std::int64_t to_stride_bytes = 0;
  std::int64_t row_bytes = 0;
  const RowRange* ranges = nullptr;  ///< in device memory, first_row ascending from 0
  std::int64_t num_ranges = 0;
  std::int64_t num_rows = 0;  ///< of all ranges
};
void copy_rows(const RowCopy& copy, cudaStream_t stream);

/// A tensor [rows, heads, dim] with contiguous channels; strides in elements.
struct TensorRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// f32 [rows, heads]; strides in elements.
struct ScalarRows {
  const float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// delta[head * num_rows + row] = sum over d of dout * out, less dlse: f32, d ascending from 0, one
/// fma for each, then one subtraction. A row with lse = -inf saw no key: 0.
struct DeltaArgs {
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t value_dim = 0;
  TensorRows out;
  TensorRows dout;
  ScalarRows lse;
  ScalarRows dlse;  ///< or no data: zeros
  float* delta = nullptr;
};
void compute_delta(const DeltaArgs& args, cudaStream_t stream);

}  // namespace cpattn::cuda
