// AttentionCase: one whole attention problem with its global inputs; Attended: its global result.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cp/config.h"
#include "kernels/reference/attention.h"
#include "kernels/shape.h"
#include "tests/support/host_tensor.h"

namespace cpattn::testing {

struct AttentionCase {
  AttentionShape shape;
  SequenceBatch batch;
  DType dtype = DType::f32;
  DType out_dtype = DType::f32;
  CpConfig config;
  HostTensor q;  ///< [q_rows, Hq, D]
  HostTensor k;  ///< [kv_rows, Hkv, D]
  HostTensor v;  ///< [kv_rows, Hkv, Dv]
};

struct Attended {
  HostTensor out;          ///< [q_rows, Hq, Dv]
  std::vector<float> lse;  ///< [q_rows, Hq]
};

/// One thread, and deadlines short enough that a deadlock fails a test instead of stopping it.
inline CpConfig test_config(MaskKind mask, std::int64_t chunk_tokens) {
  CpConfig config;
  config.mask = mask;
  config.chunk_tokens = chunk_tokens;
  config.threads = 1;
  config.timeout_seconds = 30.0;
  return config;
}

/// Heads and dims with the usual scale 1 / sqrt(head_dim).
inline AttentionShape make_shape(std::int64_t num_heads, std::int64_t num_kv_heads,
                                 std::int64_t head_dim, std::int64_t value_dim) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .value_dim = value_dim,
          .softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim))};
}

/// Tensors of the right shapes, all NaN: to be filled.
inline AttentionCase make_case(const AttentionShape& shape, const SequenceBatch& batch,
                               const CpConfig& config, DType dtype = DType::f32) {
  AttentionCase result{.shape = shape,
                       .batch = batch,
                       .dtype = dtype,
                       .out_dtype = dtype,
                       .config = config,
                       .q = {},
                       .k = {},
                       .v = {}};
  result.q = HostTensor(dtype, {batch.q_rows, shape.num_heads, shape.head_dim});
  result.k = HostTensor(dtype, {batch.kv_rows, shape.num_kv_heads, shape.head_dim});
  result.v = HostTensor(dtype, {batch.kv_rows, shape.num_kv_heads, shape.value_dim});
  return result;
}

/// Standard normal q, k, v; the documents' rows only, padding rows stay NaN.
inline AttentionCase make_random_case(const AttentionShape& shape, const SequenceBatch& batch,
                                      const CpConfig& config, DType dtype, std::uint64_t seed) {
  AttentionCase result = make_case(shape, batch, config, dtype);
  AttentionCase filled = result;
  filled.q.fill_normal(3 * seed);
  filled.k.fill_normal(3 * seed + 1);
  filled.v.fill_normal(3 * seed + 2);
  for (const Document& document : batch.documents) {
    for (std::int64_t i = 0; i < document.q_tokens; ++i)
      result.q.copy_row(document.q_begin + i, filled.q, document.q_begin + i);
    for (std::int64_t j = 0; j < document.kv_tokens; ++j) {
      result.k.copy_row(document.kv_begin + j, filled.k, document.kv_begin + j);
      result.v.copy_row(document.kv_begin + j, filled.v, document.kv_begin + j);
    }
  }
  return result;
}

inline reference::AttentionResult reference_of(const AttentionCase& problem) {
  return reference::attention({.shape = problem.shape,
                               .batch = problem.batch,
                               .mask = problem.config.mask,
                               .q = problem.q.view(),
                               .k = problem.k.view(),
                               .v = problem.v.view(),
                               .rows = {},
                               .num_threads = 2});
}

}  // namespace cpattn::testing
