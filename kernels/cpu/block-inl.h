// One kv block against one lane group of a query tile: scores, exp, P.V. The hot 99 % of the time.
//
// Lanes are queries: scores are S^T[key][row], the output is O^T[d][row], so row maximum, row sum,
// rescale, causal limit and merge are plain lane-wise operations and K, V elements are only
// broadcast. A *group* is NQ vectors of rows (NQ <= 3) at the same place of every [..][48] array.
// Each element of S, O, m, l has one accumulation order (d ascending; keys ascending within a tile
// of kKeyTile keys, from 0; tiles ascending), whatever NQ, the register tile or the rows beside it.
// Registers: 3 x 8 (AVX-512) or 3 x 4 accumulators plus NQ + 1 operands. A masked key has p = 0
// exactly and changes no bit (add_visible_values sees to infinite and NaN values). Source:
// FlashAttention-2 (Dao 2023), Alg. 1, with the online softmax of Milakov and Gimelshein (2018).

constexpr std::int64_t kLd = kQueryTile;  // row stride of all tile arrays
constexpr int kGroupVectors = 3;
constexpr int kRegisterRows = CP_REGISTER_ROWS;

/// Keys or channels of a register tile of so many vectors. One vector alone takes a whole panel:
/// multiply-adds take 4 cycles and two begin in each, which 4 sums cannot keep busy.
constexpr int register_rows(int num_vectors) {
  return num_vectors == 1 ? static_cast<int>(kPanel) : kRegisterRows;
}

template <int NQ>
struct Lanes {
  F v[NQ];
};

/// Multiply-accumulate of one element of the engine.
template <Engine E>
CP_INLINE F mac(F a, F b, F sum) {
#if defined(__AVX512BF16__)
  if constexpr (E == Engine::bf16_pair) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
  }
#endif
  return fma(a, b, sum);
}

/// Scores of `Rows` neighbouring keys of one K panel; keys at or beyond a lane's limit become -inf.
/// `ahead`: floats from a panel to what the next key tile will need of K, fetched meanwhile.
template <Engine E, int NQ, int Rows, bool Masked>
CP_INLINE void score_rows(const float* q, const float* k, std::int64_t steps, std::int64_t ahead,
                          float* scores, const F* limit, float first_key, F* row_max) {
  F sum[Rows][NQ];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) sum[i][j] = F{};
  }
#pragma GCC unroll 4
  for (std::int64_t s = 0; s < steps; ++s) {
    __builtin_prefetch(k + ahead + s * kPanel, 0, 2);
    F query[NQ];
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) query[j] = load(q + s * kLd + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const F key = broadcast(k[s * kPanel + i]);
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) sum[i][j] = mac<E>(query[j], key, sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    const F key = broadcast(first_key + static_cast<float>(i));
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      F score = sum[i][j];
      if constexpr (Masked) score = select_less(key, limit[j], score, broadcast(kEmptyMax));
      row_max[j] = larger(row_max[j], score);
      store(scores + i * kLd + j * kLanes, score);
    }
  }
}

/// One panel of keys. Limits do not decrease with the row, so it is the first vectors of rows that
/// may see none of it: their scores are -inf without being computed.
template <Engine E, int NQ, bool Masked>
CP_INLINE void score_panel(const float* q, const float* k, std::int64_t steps, float* scores,
                           const F* limit, float first_key, F* row_max) {
  if constexpr (Masked && NQ > 1) {
    if (limit[0][kLanes - 1] <= first_key) {
      for (int i = 0; i < kPanel; ++i) store(scores + i * kLd, broadcast(kEmptyMax));
      score_panel<E, NQ - 1, Masked>(q + kLanes, k, steps, scores + kLanes, limit + 1, first_key,
                                     row_max + 1);
      return;
    }
  }
  constexpr int kRows = register_rows(NQ);
#pragma GCC unroll 2
  for (int part = 0; part < kPanel; part += kRows) {
    score_rows<E, NQ, kRows, Masked>(q, k + part, steps, kKeyTile * steps, scores + part * kLd,
                                     limit, first_key + static_cast<float>(part), row_max);
  }
}

/// Whole panels: `num_keys` is rounded up to a panel, and the surplus is beyond every limit.
template <Engine E, int NQ, bool Masked>
__attribute__((noinline)) void score_keys(const float* q, const float* k, std::int64_t steps,
                                          std::int64_t num_keys, float* scores, const F* limit,
                                          float first_key, F* row_max) {
  F best[NQ];  // a local copy: the compiler must believe that a store of scores changes *row_max
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) best[j] = row_max[j];
  for (std::int64_t key = 0; key < num_keys; key += kPanel) {
    score_panel<E, NQ, Masked>(q, k + key * steps, steps, scores + key * kLd, limit,
                               first_key + static_cast<float>(key), best);
  }
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) row_max[j] = best[j];
}

/// Scores to weights 2^(s * scale - m), in place, and their sum. bf16_pair packs two keys per
/// element and sums the *rounded* weights by the same instruction as P.V, so equal values average
/// to themselves; after an odd last key comes a masked one, whose weight is 0.
template <Engine E, int NQ>
__attribute__((noinline)) void weigh_keys(float* scores, std::int64_t num_keys, F scale,
                                          const F* neg_m, F* l) {
  F shift[NQ], sum[NQ];  // local copies, as in score_keys
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) {
    shift[j] = neg_m[j];
    sum[j] = l[j];
  }
#if defined(__AVX512BF16__)
  if constexpr (E == Engine::bf16_pair) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (std::int64_t key = 0; key < num_keys; key += 2) {
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) {
        const F low =
            exp2_nonpositive<4>(fma(load(scores + key * kLd + j * kLanes), scale, shift[j]));
        const F high =
            exp2_nonpositive<4>(fma(load(scores + (key + 1) * kLd + j * kLanes), scale, shift[j]));
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        const __m512i pair = _mm512_permutexvar_epi16(interleave, (__m512i)both);
        sum[j] = (F)_mm512_dpbf16_ps((__m512)sum[j], (__m512bh)pair, ones);
        store(scores + key / 2 * kLd + j * kLanes, (F)pair);
      }
    }
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) l[j] = sum[j];
    return;
  }
#endif
  for (std::int64_t key = 0; key < num_keys; ++key) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      float* place = scores + key * kLd + j * kLanes;
      const F p = exp2_nonpositive<5>(fma(load(place), scale, shift[j]));
      sum[j] = sum[j] + p;
      store(place, p);
    }
  }
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) l[j] = sum[j];
}

/// Vectors [First, NQ) of the sums of add_channels: weight rows from `row` on to the end of vector
/// First, then without it.
template <Engine E, int NQ, int Rows, int First>
CP_INLINE void multiply_rows(const float* weights, const float* v, std::int64_t row,
                             const std::int64_t* ends, std::int64_t ahead, F (&sum)[Rows][NQ]) {
#pragma GCC unroll 4
  for (; row < ends[First]; ++row) {
    __builtin_prefetch(v + ahead + row * kPanel, 0, 2);
    F weight[NQ];
#pragma GCC unroll 3
    for (int j = First; j < NQ; ++j) weight[j] = load(weights + row * kLd + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const F value = broadcast(v[row * kPanel + i]);
#pragma GCC unroll 3
      for (int j = First; j < NQ; ++j) sum[i][j] = mac<E>(weight[j], value, sum[i][j]);
    }
  }
  if constexpr (First + 1 < NQ) {
    multiply_rows<E, NQ, Rows, First + 1>(weights, v, row, ends, ahead, sum);
  }
}

/// o[d][..] = o[d][..] * alpha + sum over weight rows of weight * V, for `Rows` neighbouring
/// channels of one V panel; vector j has its last weight that is not 0 before row ends[j], and ends
/// do not decrease. The sum of a tile starts from 0: small terms meet a small sum, not what all
/// earlier keys have added up to. `ahead` as in score_rows.
template <Engine E, int NQ, int Rows>
CP_INLINE void add_channels(const float* weights, const float* v, const std::int64_t* ends,
                            std::int64_t ahead, const F* alpha, bool is_first, float* o) {
  F sum[Rows][NQ];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      sum[i][j] = F{};
    }
  }
  multiply_rows<E, NQ, Rows, 0>(weights, v, 0, ends, ahead, sum);
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      float* place = o + i * kLd + j * kLanes;
      store(place, is_first ? sum[i][j] : fma(load(place), alpha[j], sum[i][j]));
    }
  }
}

/// All panels of V; `panel_stride` floats from one to the next.
template <Engine E, int NQ>
__attribute__((noinline)) void add_values(const float* weights, const float* v,
                                          std::int64_t panel_stride, std::int64_t value_dim,
                                          const std::int64_t* row_ends, const F* alpha,
                                          bool is_first, float* o) {
  std::int64_t ends[NQ];  // a local copy, as in score_keys
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) ends[j] = row_ends[j];
  for (std::int64_t d = 0; d < value_dim; d += kPanel) {
    constexpr int kRows = register_rows(NQ);
#pragma GCC unroll 2
    for (int part = 0; part < kPanel; part += kRows) {
      add_channels<E, NQ, kRows>(weights, v + part, ends, ends[NQ - 1] * kPanel, alpha, is_first,
                                 o + (d + part) * kLd);
    }
    v += panel_stride;
  }
}

/// For add_values: how many rows of weights each vector of a tile needs, where its lanes see
/// `limit` keys of the block and the tile holds [first, first + num_keys). Limits do not decrease
/// with the row; what is left out are trailing terms of 0, which change no bit (but the sign of a
/// zero).
template <Engine E, int NQ>
CP_INLINE void find_row_ends(const F* limit, std::int64_t first, std::int64_t num_keys,
                             std::int64_t* ends) {
  for (int j = 0; j < NQ; ++j) {
    const std::int64_t seen = static_cast<std::int64_t>(limit[j][kLanes - 1]) - first;
    const bool is_last = j == NQ - 1 || seen > num_keys;
    ends[j] = value_rows(E, is_last ? num_keys : (seen < 0 ? 0 : seen));
  }
}

/// Whether any number in these rows of V is infinite or NaN.
template <Engine E>
__attribute__((noinline)) bool has_special_values(const float* v, std::int64_t panel_stride,
                                                  std::int64_t value_dim, std::int64_t first_row,
                                                  std::int64_t num_rows) {
  constexpr std::uint32_t kExponent = E == Engine::f32 ? 0x7f800000u : 0x7f80u;
  std::uint32_t found = 0;
  for (std::int64_t d = 0; d < value_dim; d += kPanel) {
    for (std::int64_t i = first_row * kPanel; i < num_rows * kPanel; ++i) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(v[i]);
      found |= (bits & kExponent) == kExponent;
      if constexpr (E == Engine::bf16_pair) found |= ((bits >> 16) & kExponent) == kExponent;
    }
    v += panel_stride;
  }
  return found != 0;
}

/// add_values where a key that a row does not see is left out, not multiplied by its weight of 0: 0
/// times NaN is not 0. The same bits for the same visible keys.
template <Engine E, int NQ>
__attribute__((noinline)) void add_visible_values(const float* weights, const float* v,
                                                  std::int64_t panel_stride, std::int64_t value_dim,
                                                  std::int64_t num_rows, const F* alpha,
                                                  bool is_first, std::int64_t first_key,
                                                  const F* limit, float* o) {
  for (std::int64_t d = 0; d < value_dim; ++d) {
    const float* column = v + d / kPanel * panel_stride + d % kPanel;
    for (int j = 0; j < NQ; ++j) {
      float* place = o + d * kLd + j * kLanes;
      F sum{};
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const F weight = load(weights + row * kLd + j * kLanes);
        const float value = column[row * kPanel];
        if constexpr (E == Engine::f32) {
          const F key = broadcast(static_cast<float>(first_key + row));
          sum = select_less(key, limit[j], mac<E>(weight, broadcast(value), sum), sum);
        } else {
          const float low = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xffffu);
          const F key = broadcast(static_cast<float>(first_key + 2 * row));
          const F one = select_less(key, limit[j], mac<E>(weight, broadcast(low), sum), sum);
          const F both = mac<E>(weight, broadcast(value), sum);
          sum = select_less(key + broadcast(1.0f), limit[j], both, one);
        }
      }
      store(place, is_first ? sum : fma(load(place), alpha[j], sum));
    }
  }
}

/// One group's view of a state.
struct GroupState {
  float* m;
  float* l;
  float* o;
};

/// A kv block of one head, in panels.
struct HeadBlock {
  const float* k;
  const float* v;
  std::int64_t v_panel_stride;
};

/// Continues `state` (or starts it, when is_fresh) over the first max_limit keys of a block.
/// `limit[j]` holds, per lane, how many keys of the block the row sees; min_limit the smallest of
/// them.
template <Engine E, int NQ>
void attend_block(const float* q, const HeadBlock& block, std::int64_t steps,
                  std::int64_t value_dim, F scale, const F* limit, std::int64_t min_limit,
                  std::int64_t max_limit, bool is_fresh, float* scores, const GroupState& state,
                  const ProgressHook& progress) {
  constexpr std::int64_t kKeysPerRow = E == Engine::f32 ? 1 : 2;
  F m[NQ], l[NQ];
  for (int j = 0; j < NQ; ++j) {
    m[j] = is_fresh ? broadcast(kEmptyMax) : load(state.m + j * kLanes);
    l[j] = is_fresh ? F{} : load(state.l + j * kLanes);
  }
  if (is_fresh && max_limit == 0) {
    for (std::int64_t d = 0; d < value_dim; ++d) {
      for (int j = 0; j < NQ; ++j) store(state.o + d * kLd + j * kLanes, F{});
    }
  }
  for (std::int64_t first = 0; first < max_limit; first += kKeyTile) {
    const std::int64_t num_keys = max_limit - first < kKeyTile ? max_limit - first : kKeyTile;
    const std::int64_t panel_keys = (num_keys + kPanel - 1) / kPanel * kPanel;
    F row_max[NQ];
    for (int j = 0; j < NQ; ++j) row_max[j] = broadcast(kEmptyMax);
    const auto score =
        first + panel_keys > min_limit ? score_keys<E, NQ, true> : score_keys<E, NQ, false>;
    score(q, block.k + first * steps, steps, panel_keys, scores, limit, static_cast<float>(first),
          row_max);

    F neg_m[NQ], alpha[NQ], tile_l[NQ];
    for (int j = 0; j < NQ; ++j) {
      // A row that has seen nothing yet keeps m = -inf; its weights are taken against 0, so they
      // are 0.
      const F new_m = larger(m[j], row_max[j] * scale);
      const F safe_m = select_less(broadcast(kEmptyMax), new_m, new_m, F{});
      alpha[j] = exp2_nonpositive<5>(m[j] - safe_m);
      neg_m[j] = -safe_m;
      m[j] = new_m;
      tile_l[j] = F{};
    }
    weigh_keys<E, NQ>(scores, num_keys, scale, neg_m, tile_l);
    for (int j = 0; j < NQ; ++j) l[j] = fma(l[j], alpha[j], tile_l[j]);
    const float* v = block.v + first / kKeysPerRow * kPanel;
    const std::int64_t num_rows = (num_keys + kKeysPerRow - 1) / kKeysPerRow;
    const bool is_first = is_fresh && first == 0;
    const std::int64_t seen_by_all = min_limit > first ? (min_limit - first) / kKeysPerRow : 0;
    if (seen_by_all < num_rows &&
        has_special_values<E>(v, block.v_panel_stride, value_dim, seen_by_all, num_rows)) {
      add_visible_values<E, NQ>(scores, v, block.v_panel_stride, value_dim, num_rows, alpha,
                                is_first, first, limit, state.o);
    } else {
      std::int64_t ends[NQ];
      find_row_ends<E, NQ>(limit, first, num_keys, ends);
      add_values<E, NQ>(scores, v, block.v_panel_stride, value_dim, ends, alpha, is_first, state.o);
    }
    progress();
  }
  for (int j = 0; j < NQ; ++j) {
    store(state.m + j * kLanes, m[j]);
    store(state.l + j * kLanes, l[j]);
  }
}
