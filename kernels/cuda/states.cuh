// Kernels of states.h.
#pragma once

#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/states.h"

namespace cpattn::cuda {

inline constexpr int kStateThreads = 256;

/// Lanes that work on one state together: a power of two, so that a state stays within a warp.
CP_DEVICE std::int64_t state_of_thread(int lanes_per_state) {
  return (std::int64_t{blockIdx.x} * kStateThreads + threadIdx.x) / lanes_per_state;
}

__global__ void __launch_bounds__(kStateThreads)
    merge_kernel(const StateShape shape, const StateSlot left, const StateSlot right,
                 const StateSlot dst, const int lanes_per_state) {
  const std::int64_t state = state_of_thread(lanes_per_state);
  const bool is_inside = state < shape.num_states();
  const int lane = static_cast<int>(threadIdx.x) % lanes_per_state;
  float m_left = -INFINITY, m_right = -INFINITY, l_left = 0.0f, l_right = 0.0f;
  if (is_inside) {
    m_left = left.m[state];
    m_right = right.m[state];
    l_left = left.l[state];
    l_right = right.l[state];
  }
  const float m = larger(m_left, m_right);
  const float safe_m = -INFINITY < m ? m : 0.0f;  // -inf - (-inf) is never formed
  const float w_left = exp2_nonpositive(m_left - safe_m);
  const float w_right = exp2_nonpositive(m_right - safe_m);
  __syncwarp();  // all lanes of the state have read m and l, which dst may be
  if (!is_inside) return;
  if (lane == 0) {
    dst.m[state] = m;
    dst.l[state] = fmaf(l_right, w_right, l_left * w_left);
  }
  const std::int64_t first = state * shape.padded_dim();
  for (int d = 4 * lane; d < shape.value_dim; d += 4 * lanes_per_state) {
    const float4 a = *reinterpret_cast<const float4*>(left.o + first + d);
    const float4 b = *reinterpret_cast<const float4*>(right.o + first + d);
    float4 o;
    o.x = fmaf(b.x, w_right, a.x * w_left);
    o.y = fmaf(b.y, w_right, a.y * w_left);
    o.z = fmaf(b.z, w_right, a.z * w_left);
    o.w = fmaf(b.w, w_right, a.w * w_left);
    *reinterpret_cast<float4*>(dst.o + first + d) = o;
  }
}

/// IsEmpty: there is no state; every row gets what an empty one gives.
template <bool IsEmpty>
__global__ void __launch_bounds__(kStateThreads)
    finalize_kernel(const StateShape shape, const StateSlot from, const ResultRows to,
                    const int lanes_per_state) {
  const std::int64_t state = state_of_thread(lanes_per_state);
  if (state >= shape.num_states()) return;
  const std::int64_t head = state / shape.num_rows, row = state % shape.num_rows;
  const int lane = static_cast<int>(threadIdx.x) % lanes_per_state;
  const float l = IsEmpty ? 0.0f : from.l[state];
  const float inverse = 1.0f / l;
  const std::int64_t out = row * to.out_row_stride + head * to.out_head_stride;
  for (int d = lane; d < shape.value_dim; d += lanes_per_state) {
    float result = 0.0f;
    if (!IsEmpty && l != 0.0f) {
      // + 0: a zero of either sign becomes +0.
      result = divide(from.o[state * shape.padded_dim() + d], l, inverse) + 0.0f;
    }
    store_element(to.out, to.out_dtype, out + d, result);
  }
  if (lane == 0) {
    to.lse[row * to.lse_row_stride + head * to.lse_head_stride] =
        IsEmpty ? -INFINITY : natural_lse(from.m[state], l);
  }
}

/// One block for each head.
__global__ void __launch_bounds__(kStateThreads)
    head_maxima_kernel(const StateShape shape, const float* m, float* maxima) {
  CP_DYNAMIC_SMEM(memory);  // one float for each warp
  float* of_warps = reinterpret_cast<float*>(memory);
  constexpr int kWarps = kStateThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  m += std::int64_t{blockIdx.x} * shape.num_rows;
  float best = -INFINITY;
  for (std::int64_t row = threadIdx.x; row < shape.num_rows; row += kStateThreads) {
    best = larger_or_nan(m[row], best);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    best = larger_or_nan(__shfl_xor_sync(0xffffffffu, best, distance), best);
  }
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kWarps; ++i) best = larger_or_nan(of_warps[i], best);
  // Rounding keeps order, so the maximum may be taken before the conversion.
  const float logit = static_cast<float>(static_cast<double>(best) * kLn2);
  maxima[blockIdx.x] = larger_or_nan(logit, maxima[blockIdx.x]);
}

}  // namespace cpattn::cuda
