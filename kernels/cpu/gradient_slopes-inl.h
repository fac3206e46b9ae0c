// From scores and dout.v to p and ds: the elementwise part of a backward tile.

/// Where the numbers of one group of lanes are, and how many keys each lane sees.
struct SlopeGroup {
  float* weights;     ///< scores -> p
  float* slopes;      ///< dout.v -> ds
  float* slope_rows;  ///< bf16_pair: ds in pairs of rows
  const float* lse;   ///< in units of log2
  const float* delta;
  const float* limit;
};

template <int NQ>
struct SlopeConstants {
  F shift[NQ], mean[NQ], seen[NQ];
};

template <int NQ>
CP_INLINE SlopeConstants<NQ> load_constants(const SlopeGroup& group) {
  SlopeConstants<NQ> constants;
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) {
    constants.shift[j] = -load(group.lse + j * kLanes);
    constants.mean[j] = load(group.delta + j * kLanes);
    constants.seen[j] = load(group.limit + j * kLanes);
  }
  return constants;
}

/// p = 2^(score * scale - lse) and ds = p * (dout.v - delta). Rounding of lse may lift the exponent
/// above 0, where a weight cannot be: it is held there. Where a row does not see a key both are 0,
/// whatever they were.
template <int Degree, int NQ, bool Masked>
CP_INLINE void weigh_one(F score, F dot, F scale, F key, const SlopeConstants<NQ>& constants, int j,
                         F& p, F& ds) {
  p = exp2_nonpositive<Degree>(smaller(F{}, fma(score, scale, constants.shift[j])));
  ds = p * (dot - constants.mean[j]);
  if constexpr (Masked) {
    p = select_less(key, constants.seen[j], p, F{});
    ds = select_less(key, constants.seen[j], ds, F{});
  }
}

#if defined(__AVX512BF16__)
/// NQ vectors of rows rounded to bf16, in pairs of neighbouring rows.
template <int NQ>
CP_INLINE void store_row_pairs(float* to, const F* rows) {
  if constexpr (NQ == 1) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)rows[0]);
    std::memcpy(to, &half, sizeof(half));
  } else {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
    std::memcpy(to, &both, sizeof(both));
    if constexpr (NQ == 3) store_row_pairs<1>(to + kLanes, rows + 2);
  }
}

/// Two keys of a lane rounded to bf16, side by side.
CP_INLINE F pair_of_keys(F low, F high) {
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (F)_mm512_permutexvar_epi16(interleave, (__m512i)both);
}

/// In pairs. What is written never passes what is still to be read: two keys of 48 lanes become two
/// rows of 24 or one of 48.
template <int NQ, bool Masked>
CP_INLINE void weigh_pairs(const SlopeGroup& group, std::int64_t num_keys, F scale,
                           std::int64_t first_key) {
  constexpr std::int64_t kStride = kQueryTile / 2;
  const SlopeConstants<NQ> constants = load_constants<NQ>(group);
  for (std::int64_t key = 0; key < num_keys; key += 2) {
    F p[2][NQ], ds[2][NQ];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const F number = broadcast(static_cast<float>(first_key + key + i));
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) {
        const std::int64_t place = (key + i) * kLd + j * kLanes;
        weigh_one<4, NQ, Masked>(load(group.weights + place), load(group.slopes + place), scale,
                                 number, constants, j, p[i][j], ds[i][j]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      store_row_pairs<NQ>(group.weights + (key + i) * kStride, p[i]);
      store_row_pairs<NQ>(group.slope_rows + (key + i) * kStride, ds[i]);
    }
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      store(group.slopes + key / 2 * kLd + j * kLanes, pair_of_keys(ds[0][j], ds[1][j]));
    }
  }
}
#endif

/// `num_keys` is even.
template <Engine E, int NQ, bool Masked>
__attribute__((noinline)) void weigh_slopes(const SlopeGroup& group, std::int64_t num_keys, F scale,
                                            std::int64_t first_key) {
#if defined(__AVX512BF16__)
  if constexpr (E == Engine::bf16_pair) {
    weigh_pairs<NQ, Masked>(group, num_keys, scale, first_key);
    return;
  }
#endif
  const SlopeConstants<NQ> constants = load_constants<NQ>(group);
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const F number = broadcast(static_cast<float>(first_key + key));
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      float* weight = group.weights + key * kLd + j * kLanes;
      float* slope = group.slopes + key * kLd + j * kLanes;
      F p, ds;
      weigh_one<5, NQ, Masked>(load(weight), load(slope), scale, number, constants, j, p, ds);
      store(weight, p);
      store(slope, ds);
    }
  }
}
