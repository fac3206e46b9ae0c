// Rows of tensors in device memory: copied by ranges (shards gathered and scattered), and delta of
// the backward.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/compat.h"
#include "kernels/rows.h"
#include "src/base/dtype.h"

namespace cpattn::cuda {

/// KernelTable::copy_rows.
void copy_rows(const RowCopy& copy);

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
