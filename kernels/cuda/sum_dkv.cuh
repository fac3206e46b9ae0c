// Kernels of sum_dkv.h.
#pragma once

#include "kernels/block_gradient.h"
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/gradient_slots.h"

namespace cpattn::cuda {

inline constexpr int kSumThreads = 256;
inline constexpr int kSumOps = 48;     ///< of one launch: 1.5 KiB of its 4 KiB of parameters
inline constexpr int kSumChunks = 48;  ///< likewise 1.1 KiB

/// A caller's tensor; strides in elements, channels contiguous.
struct GradientTensor {
  void* elements = nullptr;
  DType dtype = DType::f32;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

struct ChunkToSum {
  std::int64_t row_begin = 0;
  std::int64_t num_keys = 0;
  int op_begin = 0;
  int op_end = 0;
};

struct OpOnSlots {
  DkvOpKind kind = DkvOpKind::sum;
  float* dst = nullptr;
  const float* left = nullptr;
  const float* right = nullptr;
};

struct SumParams {
  GradientSlotForm form;
  GradientTensor dk, dv;
  float scale = 1.0f;
  int num_kv_heads = 1;
  ChunkToSum chunks[kSumChunks];
  OpOnSlots ops[kSumOps];
};

/// Four floats of a slot.
struct CP_MAY_ALIAS Quad {
  alignas(16) float at[4];
};

/// One quad of a chunk: where it lies in slots and in the gradients.
struct QuadPlace {
  std::int64_t key = 0;
  std::int64_t head = 0;
  int channel = 0;
  bool is_dk = false;
};

CP_DEVICE QuadPlace quad_place(const GradientSlotForm& form, std::int64_t num_keys,
                               std::int64_t quad) {
  const std::int64_t head_quads = form.head_floats(num_keys) / 4;
  const std::int64_t dk_quads = num_keys * (form.dk_floats() / 4);
  const std::int64_t head = quad / head_quads, within = quad % head_quads;
  const bool is_dk = within < dk_quads;
  const std::int64_t in_part = is_dk ? within : within - dk_quads;
  const int row_quads = (is_dk ? form.dk_floats() : form.dv_floats()) / 4;
  return {in_part / row_quads, head, static_cast<int>(in_part % row_quads) * 4, is_dk};
}

/// Scaled once, rounded once; zeros are +0. `quad` is null for zeros.
CP_DEVICE void finish_quad(const SumParams& params, const ChunkToSum& chunk, const QuadPlace& place,
                           const Quad* quad) {
  const GradientTensor& to = place.is_dk ? params.dk : params.dv;
  const int dim = place.is_dk ? params.form.head_dim : params.form.value_dim;
  const float scale = place.is_dk ? params.scale : 1.0f;
  const std::int64_t first =
      (chunk.row_begin + place.key) * to.row_stride + place.head * to.head_stride + place.channel;
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (place.channel + i >= dim) break;
    const float value = quad == nullptr ? 0.0f : quad->at[i] * scale + 0.0f;
    store_element(to.elements, to.dtype, first + i, value);
  }
}

/// blockIdx.y: the chunk.
__global__ void __launch_bounds__(kSumThreads)
    sum_dkv_kernel(const __grid_constant__ SumParams params) {
  const ChunkToSum& chunk = params.chunks[blockIdx.y];
  const std::int64_t num_quads = params.num_kv_heads * params.form.head_floats(chunk.num_keys) / 4;
  const std::int64_t i = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (i >= num_quads) return;
  for (int op_index = chunk.op_begin; op_index < chunk.op_end; ++op_index) {
    const OpOnSlots& op = params.ops[op_index];
    if (op.kind == DkvOpKind::finish_empty) {
      finish_quad(params, chunk, quad_place(params.form, chunk.num_keys, i), nullptr);
      continue;
    }
    Quad quad = reinterpret_cast<const Quad*>(op.left)[i];
    if (op.kind == DkvOpKind::finish) {
      finish_quad(params, chunk, quad_place(params.form, chunk.num_keys, i), &quad);
      continue;
    }
    if (op.kind == DkvOpKind::sum) {
      const Quad right = reinterpret_cast<const Quad*>(op.right)[i];
      CP_UNROLL
      for (int c = 0; c < 4; ++c) quad.at[c] += right.at[c];
    }
    reinterpret_cast<Quad*>(op.dst)[i] = quad;
  }
}

/// Zeros of any type are zero bits.
struct ZeroParams {
  void* elements = nullptr;  ///< of the first row
  std::int64_t element_bytes = 4;
  std::int64_t row_stride = 0;  ///< in elements
  std::int64_t head_stride = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_heads = 0;
  std::int64_t dim = 0;
};

struct CP_MAY_ALIAS HalfZero {
  std::uint16_t bits;
};
struct CP_MAY_ALIAS WholeZero {
  std::uint32_t bits;
};

__global__ void __launch_bounds__(kSumThreads) zero_rows_kernel(const ZeroParams params) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (i >= params.num_rows * params.num_heads * params.dim) return;
  const std::int64_t row = i / params.dim / params.num_heads;
  const std::int64_t head = i / params.dim % params.num_heads;
  const std::int64_t at = row * params.row_stride + head * params.head_stride + i % params.dim;
  if (params.element_bytes == 4) {
    static_cast<WholeZero*>(params.elements)[at].bits = 0;
  } else {
    static_cast<HalfZero*>(params.elements)[at].bits = 0;
  }
}

}  // namespace cpattn::cuda
