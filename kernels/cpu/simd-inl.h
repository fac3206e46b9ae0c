// Vectors of W lanes with the few operations the kernels need, for the instruction set this file is
// compiled for. No #pragma once: included once per instruction-set source, inside its namespace,
// after CP_LANES is defined.
//
// Every operation is exactly defined per lane (fma is one rounding, nothing is contracted by the
// compiler), so a lane's bits are the same for every W and instruction set; only the bf16 dot
// instruction exists on one of them.

using F = float __attribute__((vector_size(4 * CP_LANES), may_alias));
using I = std::int32_t __attribute__((vector_size(4 * CP_LANES), may_alias));
using Half = std::uint16_t __attribute__((vector_size(2 * CP_LANES), may_alias));
constexpr int kLanes = CP_LANES;

#define CP_INLINE inline __attribute__((always_inline))

CP_INLINE F load(const float* p) { return *reinterpret_cast<const F*>(p); }  // p: vector-aligned
CP_INLINE void store(float* p, F v) { *reinterpret_cast<F*>(p) = v; }
CP_INLINE F load_unaligned(const void* p) {
  F v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
CP_INLINE void store_unaligned(void* p, F v) { std::memcpy(p, &v, sizeof(v)); }

// larger(a, b) is a > b ? a : b, and smaller likewise: a NaN in b comes through, a NaN in a does
// not. select_less(a, b, yes, no) takes `no` when either is NaN.
#if defined(__AVX512F__)
CP_INLINE F broadcast(float x) { return (F)_mm512_set1_ps(x); }
CP_INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
CP_INLINE F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
CP_INLINE F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
CP_INLINE F select_less(F a, F b, F yes, F no) {
  const __mmask16 is_less = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
  return (F)_mm512_mask_blend_ps(is_less, (__m512)no, (__m512)yes);
}
#elif defined(__AVX2__)
CP_INLINE F broadcast(float x) { return (F)_mm256_set1_ps(x); }
CP_INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
CP_INLINE F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
CP_INLINE F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
CP_INLINE F select_less(F a, F b, F yes, F no) {
  const __m256 is_less = _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ);
  return (F)_mm256_blendv_ps((__m256)no, (__m256)yes, is_less);
}
#else
CP_INLINE F broadcast(float x) {
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = x;
  return v;
}
CP_INLINE F fma(F a, F b, F c) {
#if defined(__ARM_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = std::fma(a[i], b[i], c[i]);
  return v;
#endif
}
CP_INLINE F larger(F a, F b) { return (a > b) ? a : b; }
CP_INLINE F smaller(F a, F b) { return (a < b) ? a : b; }
CP_INLINE F select_less(F a, F b, F yes, F no) { return (a < b) ? yes : no; }
#endif

/// 2^x for x <= ~0.5, relative error below 2e-7 (Degree 5) or 3e-6 (Degree 4); exactly 1 at x = 0,
/// exactly 0 for x <= -126.5 (so for -inf), NaN for NaN.
///
/// x = n + f with n = round(x): adding 1.5 * 2^23 + 127 leaves n + 127 in the low bits of the sum,
/// and a shift by 23 makes them the exponent field of 2^n (0 for n = -127, which flushes).
/// Polynomial: minimax of 2^f on [-1/2, 1/2] among those with p(0) = 1, so that a rescale by 2^0
/// changes no bit.
template <int Degree>
CP_INLINE F exp2_nonpositive(F x) {
  static_assert(Degree == 4 || Degree == 5);
  const F magic = broadcast(12582912.0f + 127.0f);
  x = larger(broadcast(-127.0f), x);  // operand order keeps NaN
  const F shifted = x + magic;
  const F f = x - (shifted - magic);
  F p;
  if constexpr (Degree == 5) {
    p = broadcast(0x1.5bb9fap-10f);
    p = fma(p, f, broadcast(0x1.3cea86p-7f));
    p = fma(p, f, broadcast(0x1.c6b754p-5f));
    p = fma(p, f, broadcast(0x1.ebf9bcp-3f));
    p = fma(p, f, broadcast(0x1.62e42ap-1f));
  } else {
    p = broadcast(0x1.3a02a4p-7f);
    p = fma(p, f, broadcast(0x1.c9fc3cp-5f));
    p = fma(p, f, broadcast(0x1.ec0378p-3f));
    p = fma(p, f, broadcast(0x1.62e12cp-1f));
  }
  p = fma(p, f, broadcast(1.0f));
  return p * (F)((I)shifted << 23);
}

/// One butterfly of the transpose: lanes whose bit Span is clear come from a, the others from b.
template <int Span, bool High, int... Lane>
CP_INLINE F exchange_lanes(F a, F b, std::integer_sequence<int, Lane...>) {
  constexpr auto source = [](int lane) {
    const int inside = High ? (lane | Span) : (lane & ~Span);
    return (lane & Span) != 0 ? inside + kLanes : inside;
  };
  return __builtin_shufflevector(a, b, source(Lane)...);
}

template <int Span>
CP_INLINE void transpose_stage(F* rows) {
  constexpr auto kEveryLane = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & Span) != 0) continue;
    const F a = rows[i], b = rows[i + Span];
    rows[i] = exchange_lanes<Span, false>(a, b, kEveryLane);
    rows[i + Span] = exchange_lanes<Span, true>(a, b, kEveryLane);
  }
}

/// rows[i][j] <-> rows[j][i] in log2(W) stages.
CP_INLINE void transpose(F* rows) {
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  if constexpr (kLanes >= 8) transpose_stage<4>(rows);
  if constexpr (kLanes >= 16) transpose_stage<8>(rows);
}

/// W elements of 16 bits as f32 (exact).
CP_INLINE F widen_bf16(const void* p) {
  Half half;
  std::memcpy(&half, p, sizeof(half));
  return (F)(__builtin_convertvector(half, I) << 16);
}

CP_INLINE F widen_f16(const void* p) {
#if defined(__AVX512F__)
  __m256i half;
  std::memcpy(&half, p, sizeof(half));
  return (F)_mm512_cvtph_ps(half);
#elif defined(__F16C__)
  __m128i half;
  std::memcpy(&half, p, sizeof(half));
  return (F)_mm256_cvtph_ps(half);
#else
  F v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(static_cast<const cpattn::f16*>(p)[i]);
  return v;
#endif
}

/// bf16 bits (to nearest, ties to even; NaN kept quiet) in the low half of each lane.
CP_INLINE I round_bf16(F v) {
  const I bits = (I)v;
  const I rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  const I quiet = ((bits >> 16) & 0xffff) | 0x40;
  return (v == v) ? rounded : quiet;
}

CP_INLINE void store_bf16(void* p, F v) {
  const Half half = __builtin_convertvector(round_bf16(v), Half);
  std::memcpy(p, &half, sizeof(half));
}

CP_INLINE void store_f16(void* p, F v) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &half, sizeof(half));
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &half, sizeof(half));
#else
  for (int i = 0; i < kLanes; ++i) static_cast<cpattn::f16*>(p)[i] = to_f16(v[i]);
#endif
}
