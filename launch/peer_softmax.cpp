// The softmax of the peer: one source in vectors of 16 floats, compiled for three instruction sets.
#include <algorithm>
#include <cstring>
#include <limits>

#include "launch/peer_openblas.h"

namespace cpattn::detail {
namespace {

constexpr std::int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));

#define CP_INLINE inline __attribute__((always_inline))

CP_INLINE Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

CP_INLINE void store(float* to, const Floats& value) { std::memcpy(to, &value, sizeof value); }

CP_INLINE Floats all(float value) { return value - Floats{}; }

CP_INLINE void keep_larger(Floats& largest, const Floats& value) {
  largest = value > largest ? value : largest;
}

/// x becomes 2^x for x <= 0, error 2e-7. 2^f on [-1/2, 1/2] is the polynomial through 2^f at the
/// six Chebyshev nodes; the whole part goes into the exponent.
CP_INLINE void exp2_of(Floats& x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  x = x > -126.0f ? x : all(-126.0f);
  const Floats shifted = x + kRound;
  const Floats f = x - (shifted - kRound);
  const Floats power =
      ((((1.339086336e-3f * f + 9.676031918e-3f) * f + 5.550357114e-2f) * f + 2.402210749e-1f) * f +
       6.931471880e-1f) *
          f +
      1.000000075f;
  Ints bits, whole;
  std::memcpy(&bits, &power, sizeof bits);
  std::memcpy(&whole, &shifted, sizeof whole);
  bits += whole << 23;
  std::memcpy(&x, &bits, sizeof x);
}

/// The lanes of keys at or beyond the visible ones become `value`.
CP_INLINE void hide(Floats& scores, std::int64_t num_visible, float value) {
  const Ints lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  scores = lane < static_cast<std::int32_t>(num_visible) ? scores : all(value);
}

CP_INLINE float largest_of(const float* row, std::int64_t visible) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  Floats largest = all(kNone);
  std::int64_t key = 0;
  for (; key + kLanes <= visible; key += kLanes) keep_larger(largest, load(row + key));
  if (key < visible) {
    Floats rest = load(row + key);
    hide(rest, visible - key, kNone);
    keep_larger(largest, rest);
  }
  float result = kNone;
  for (int lane = 0; lane < kLanes; ++lane) result = std::max(result, largest[lane]);
  return result;
}

CP_INLINE float weights_of(float* row, std::int64_t visible, float largest) {
  Floats sum = all(0.0f);
  std::int64_t key = 0;
  for (; key + kLanes <= visible; key += kLanes) {
    Floats weight = load(row + key) - largest;
    exp2_of(weight);
    sum += weight;
    store(row + key, weight);
  }
  if (key < visible) {
    Floats weight = load(row + key) - largest;
    exp2_of(weight);
    hide(weight, visible - key, 0.0f);
    sum += weight;
    store(row + key, weight);
  }
  float result = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) result += sum[lane];
  return result;
}

CP_INLINE void all_rows(const SoftmaxRows& rows) {
  for (std::int64_t i = 0; i < rows.num_rows; ++i) {
    float* row = rows.scores + i * rows.stride;
    const bool sees_all = rows.visible_begin < 0 || rows.visible_begin + i > rows.num_keys;
    const std::int64_t visible = sees_all ? rows.num_keys : rows.visible_begin + i;
    const float sum = weights_of(row, visible, largest_of(row, visible));
    for (std::int64_t key = visible; key < rows.num_keys; ++key) row[key] = 0.0f;
    rows.inverse_sum[i] = 1.0f / sum;
  }
}

void rows_for_any(const SoftmaxRows& rows) { all_rows(rows); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void rows_for_avx2(const SoftmaxRows& rows) { all_rows(rows); }

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) void rows_for_avx512(
    const SoftmaxRows& rows) {
  all_rows(rows);
}
#endif

}  // namespace

void softmax_rows(const SoftmaxRows& rows) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return rows_for_avx512(rows);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return rows_for_avx2(rows);
#endif
  rows_for_any(rows);
}

}  // namespace cpattn::detail
