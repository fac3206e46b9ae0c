// The five products of a backward tile, each adding to what it finds or filling a tile.
//
// Scores and dout.v have queries as lanes, like forward, so p and ds need no shuffles; dq is
// another such product, with ds as lanes and K broadcast. dk and dv have channels as lanes, and p
// and ds are broadcast: their rows lie in L1, 8 of them at a time. All five are register tiles of
// up to 8 x 3 (AVX-512) or 4 x 3 accumulators. Every element has one accumulation order: channels
// ascending, keys ascending, or rows ascending, from 0.

/// Covers [begin, end) in pieces of Rows, then of half as many, down to 1:
/// visit(integral_constant<int, piece>, first).
template <int Rows, class Visit>
CP_INLINE void in_pieces(std::int64_t begin, std::int64_t end, const Visit& visit) {
  for (; begin + Rows <= end; begin += Rows) visit(std::integral_constant<int, Rows>{}, begin);
  if constexpr (Rows > 1) in_pieces<Rows / 2>(begin, end, visit);
}

#define CP_INLINE_LAMBDA __attribute__((always_inline))

/// to[key][lane] = dout of the lane . v of the key, for `Rows` neighbouring keys.
template <int NQ, int Rows>
CP_INLINE void dot_value_rows(const float* dout, const float* v, std::int64_t panel_stride,
                              std::int64_t value_dim, float* to) {
  F sum[Rows][NQ];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) sum[i][j] = F{};
  }
  for (std::int64_t d = 0; d < value_dim; d += kPanel) {
#pragma GCC unroll 8
    for (int s = 0; s < kPanel; ++s) {
      F lanes[NQ];
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) lanes[j] = load(dout + (d + s) * kLd + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const F value = broadcast(v[i * kPanel + s]);
#pragma GCC unroll 3
        for (int j = 0; j < NQ; ++j) sum[i][j] = fma(lanes[j], value, sum[i][j]);
      }
    }
    v += panel_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) store(to + i * kLd + j * kLanes, sum[i][j]);
  }
}

template <int NQ>
__attribute__((noinline)) void dot_values(const float* dout, const float* v,
                                          std::int64_t panel_stride, std::int64_t value_dim,
                                          std::int64_t num_keys, float* to) {
  in_pieces<kRegisterRows>(0, num_keys, [&](auto rows, std::int64_t key) CP_INLINE_LAMBDA {
    dot_value_rows<NQ, rows>(dout, v + key * kPanel, panel_stride, value_dim, to + key * kLd);
  });
}

/// Scores to p = 2^(s * scale - lse) and dout.v to ds = p * (dout.v - delta), in place. Rounding of
/// lse may lift the exponent above 0, where a weight cannot be: it is held there. Where a row does
/// not see a key both become 0, whatever they were.
template <int NQ, bool Masked>
__attribute__((noinline)) void weigh_slopes(float* weights, float* slopes, std::int64_t num_keys,
                                            F scale, const float* lse, const float* delta,
                                            const float* limit, std::int64_t first_key) {
  F shift[NQ], mean[NQ], seen[NQ];
#pragma GCC unroll 3
  for (int j = 0; j < NQ; ++j) {
    shift[j] = -load(lse + j * kLanes);
    mean[j] = load(delta + j * kLanes);
    seen[j] = load(limit + j * kLanes);
  }
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const F number = broadcast(static_cast<float>(first_key + key));
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      float* weight = weights + key * kLd + j * kLanes;
      float* slope = slopes + key * kLd + j * kLanes;
      F p = exp2_nonpositive<5>(smaller(F{}, fma(load(weight), scale, shift[j])));
      F ds = p * (load(slope) - mean[j]);
      if constexpr (Masked) {
        p = select_less(number, seen[j], p, F{});
        ds = select_less(number, seen[j], ds, F{});
      }
      store(weight, p);
      store(slope, ds);
    }
  }
}

/// dq[channel][lane] += sum over keys of ds * k, for `Rows` neighbouring channels; `k` at the first
/// of them in the first key panel.
template <int NQ, int Rows>
CP_INLINE void add_key_channels(const float* slopes, const float* k, std::int64_t panel_stride,
                                std::int64_t num_keys, float* dq) {
  F sum[Rows][NQ];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) sum[i][j] = F{};
  }
  for (std::int64_t key = 0; key < num_keys; key += kPanel) {
#pragma GCC unroll 8
    for (int s = 0; s < kPanel; ++s) {
      F slope[NQ];
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) slope[j] = load(slopes + (key + s) * kLd + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const F channel = broadcast(k[i * kPanel + s]);
#pragma GCC unroll 3
        for (int j = 0; j < NQ; ++j) sum[i][j] = fma(slope[j], channel, sum[i][j]);
      }
    }
    k += panel_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) {
      float* place = dq + i * kLd + j * kLanes;
      store(place, load(place) + sum[i][j]);
    }
  }
}

/// Whole panels of keys; surplus keys have ds = 0 and k = 0.
template <int NQ>
__attribute__((noinline)) void add_keys(const float* slopes, const float* k, std::int64_t head_dim,
                                        std::int64_t num_keys, float* dq) {
  in_pieces<kRegisterRows>(0, head_dim, [&](auto rows, std::int64_t d) CP_INLINE_LAMBDA {
    add_key_channels<NQ, rows>(slopes, k + d * kPanel, head_dim * kPanel, num_keys, dq + d * kLd);
  });
}

/// add_keys where a key that a row does not see is left out, not multiplied by its ds of 0: 0 times
/// NaN is not 0. The same bits for the same visible keys.
__attribute__((noinline)) void add_visible_keys(const float* slopes, const float* k,
                                                std::int64_t head_dim, std::int64_t num_keys,
                                                const float* limit, std::int64_t first_key,
                                                std::int64_t num_vectors, float* dq) {
  for (std::int64_t d = 0; d < head_dim; ++d) {
    for (std::int64_t lane = 0; lane < num_vectors * kLanes; lane += kLanes) {
      const F seen = load(limit + lane);
      F sum{};
      for (std::int64_t key = 0; key < num_keys; ++key) {
        const F channel = broadcast(k[(key / kPanel * head_dim + d) * kPanel + key % kPanel]);
        const F number = broadcast(static_cast<float>(first_key + key));
        sum = select_less(number, seen, fma(load(slopes + key * kLd + lane), channel, sum), sum);
      }
      float* place = dq + d * kLd + lane;
      store(place, load(place) + sum);
    }
  }
}

/// A run of rows [begin, end) of a row-major operand.
struct RowRun {
  const float* rows;
  std::int64_t row_floats;
  std::int64_t begin;
  std::int64_t end;
};

/// to[key][channel] += sum over rows of weights[key][row] * rows[row][channel], for `Keys` keys and
/// NV vectors of channels.
template <int Keys, int NV>
CP_INLINE void add_row_block(const float* weights, const RowRun& run, std::int64_t channel,
                             float* to, std::int64_t to_stride) {
  F sum[Keys][NV];
#pragma GCC unroll 8
  for (int i = 0; i < Keys; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) sum[i][j] = F{};
  }
  const float* from = run.rows + channel;
#pragma GCC unroll 4
  for (std::int64_t row = run.begin; row < run.end; ++row) {
    F lanes[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) lanes[j] = load(from + row * run.row_floats + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Keys; ++i) {
      const F weight = broadcast(weights[i * kLd + row]);
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) sum[i][j] = fma(weight, lanes[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Keys; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) {
      float* place = to + i * to_stride + channel + j * kLanes;
      store(place, load(place) + sum[i][j]);
    }
  }
}

/// All channels of `Keys` keys: 3 vectors at a time, but 2 and 2 for the last 4, which keeps more
/// chains in flight than 3 and 1.
template <int Keys>
CP_INLINE void add_row_channels(const float* weights, const RowRun& run, float* to,
                                std::int64_t to_stride) {
  std::int64_t channel = 0, left = run.row_floats / kLanes;
  while (left > 0) {
    const std::int64_t vectors = left == 4 ? 2 : (left < 3 ? left : 3);
    switch (vectors) {
      case 1:
        add_row_block<Keys, 1>(weights, run, channel, to, to_stride);
        break;
      case 2:
        add_row_block<Keys, 2>(weights, run, channel, to, to_stride);
        break;
      default:
        add_row_block<Keys, 3>(weights, run, channel, to, to_stride);
        break;
    }
    channel += vectors * kLanes;
    left -= vectors;
  }
}

/// `num_keys` <= kPanel keys: the rows of a run all see the first of them.
__attribute__((noinline)) void add_rows(const float* weights, const RowRun& run,
                                        std::int64_t num_keys, float* to, std::int64_t to_stride) {
  in_pieces<kRegisterRows>(0, num_keys, [&](auto keys, std::int64_t key) CP_INLINE_LAMBDA {
    add_row_channels<keys>(weights + key * kLd, run, to + key * to_stride, to_stride);
  });
}

/// add_rows where a row that does not see a key is left out of its sum.
__attribute__((noinline)) void add_visible_rows(const float* weights, const RowRun& run,
                                                std::int64_t num_keys, const float* limit,
                                                std::int64_t first_key, float* to,
                                                std::int64_t to_stride) {
  for (std::int64_t key = 0; key < num_keys; ++key) {
    for (std::int64_t channel = 0; channel < run.row_floats; channel += kLanes) {
      F sum{};
      for (std::int64_t row = run.begin; row < run.end; ++row) {
        if (!(static_cast<float>(first_key + key) < limit[row])) continue;
        sum = fma(broadcast(weights[key * kLd + row]),
                  load(run.rows + row * run.row_floats + channel), sum);
      }
      float* place = to + key * to_stride + channel;
      store(place, load(place) + sum);
    }
  }
}
