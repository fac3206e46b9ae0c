// The five products of a backward tile, as far as forward does not have them.
//
// Scores and dout.v have queries as lanes, like forward, so p and ds need no shuffles; dq is
// another such product, with ds as lanes and K broadcast. With pairs these three are forward's own
// loops, on v that lies as k does and on k that lies as v does; with f32, dout.v and dq read the
// panels that forward reads, the other way round, and nothing is copied. dk and dv have channels as
// lanes, and p and ds are broadcast: their rows lie in L1, 8 of them at a time. All are register
// tiles of up to 8 x 3 (AVX-512) or 4 x 3 accumulators. Every element has one accumulation order:
// channels ascending, keys ascending, or rows ascending, from 0.

/// Covers [begin, end) in pieces of Rows, then of half as many, down to 1:
/// visit(integral_constant<int, piece>, first).
template <int Rows, class Visit>
CP_INLINE void in_pieces(std::int64_t begin, std::int64_t end, const Visit& visit) {
  for (; begin + Rows <= end; begin += Rows) visit(std::integral_constant<int, Rows>{}, begin);
  if constexpr (Rows > 1) in_pieces<Rows / 2>(begin, end, visit);
}

#define CP_INLINE_LAMBDA __attribute__((always_inline))

/// Sums over `count` steps, whole panels, of lanes[step][..] * panel[i][step], for `Rows` rows i of
/// a panel that is read across: its row i holds the next kPanel steps. visit(i, j, sum) gets vector
/// j of the sum of row i.
template <int NQ, int Rows, class Visit>
CP_INLINE void sum_across_panels(const float* lanes, const float* panel, std::int64_t panel_stride,
                                 std::int64_t count, const Visit& visit) {
  F sum[Rows][NQ];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) sum[i][j] = F{};
  }
  for (std::int64_t step = 0; step < count; step += kPanel) {
#pragma GCC unroll 8
    for (int s = 0; s < kPanel; ++s) {
      F vector[NQ];
#pragma GCC unroll 3
      for (int j = 0; j < NQ; ++j) vector[j] = load(lanes + (step + s) * kLd + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const F element = broadcast(panel[i * kPanel + s]);
#pragma GCC unroll 3
        for (int j = 0; j < NQ; ++j) sum[i][j] = fma(vector[j], element, sum[i][j]);
      }
    }
    panel += panel_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NQ; ++j) visit(i, j, sum[i][j]);
  }
}

/// to[key][lane] = dout of the lane . v of the key.
template <int NQ>
__attribute__((noinline)) void dot_values(const float* dout, const float* v,
                                          std::int64_t panel_stride, std::int64_t value_dim,
                                          std::int64_t num_keys, float* to) {
  in_pieces<kRegisterRows>(0, num_keys, [&](auto rows, std::int64_t key) CP_INLINE_LAMBDA {
    sum_across_panels<NQ, rows>(dout, v + key * kPanel, panel_stride, value_dim,
                                [&](int i, int j, F sum) CP_INLINE_LAMBDA {
                                  store(to + (key + i) * kLd + j * kLanes, sum);
                                });
  });
}

/// dq[channel][lane] += sum over keys of ds * k. Whole panels of keys; surplus keys have ds = 0 and
/// k = 0.
template <int NQ>
__attribute__((noinline)) void add_keys(const float* slopes, const float* k, std::int64_t head_dim,
                                        std::int64_t num_keys, float* dq) {
  in_pieces<kRegisterRows>(0, head_dim, [&](auto rows, std::int64_t d) CP_INLINE_LAMBDA {
    sum_across_panels<NQ, rows>(slopes, k + d * kPanel, head_dim * kPanel, num_keys,
                                [&](int i, int j, F sum) CP_INLINE_LAMBDA {
                                  float* place = dq + (d + i) * kLd + j * kLanes;
                                  store(place, load(place) + sum);
                                });
  });
}

/// add_keys where a key that a row does not see is left out, not multiplied by its ds of 0: 0 times
/// NaN is not 0. The same bits for the same visible keys.
template <int NQ>
__attribute__((noinline)) void add_visible_keys(const float* slopes, const float* k,
                                                std::int64_t head_dim, std::int64_t num_keys,
                                                const F* limit, std::int64_t first_key, float* dq) {
  for (std::int64_t d = 0; d < head_dim; ++d) {
    for (int j = 0; j < NQ; ++j) {
      F sum{};
      for (std::int64_t key = 0; key < num_keys; ++key) {
        const F channel = broadcast(k[(key / kPanel * head_dim + d) * kPanel + key % kPanel]);
        const F number = broadcast(static_cast<float>(first_key + key));
        const F more = fma(load(slopes + key * kLd + j * kLanes), channel, sum);
        sum = select_less(number, limit[j], more, sum);
      }
      float* place = dq + d * kLd + j * kLanes;
      store(place, load(place) + sum);
    }
  }
}

/// A run [begin, end) of rows, or of pairs of rows, of a row-major operand.
struct RowRun {
  const float* rows;
  std::int64_t row_floats;
  std::int64_t begin;
  std::int64_t end;
};

/// From the weights of one key to the next, for add_rows.
template <Engine E>
constexpr std::int64_t kWeightStride = kQueryTile / rows_per_element(E);

/// to[key][channel] += sum over rows of weights[key][row] * rows[row][channel], for `Keys` keys and
/// NV vectors of channels.
template <Engine E, int Keys, int NV>
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
      const F weight = broadcast(weights[i * kWeightStride<E> + row]);
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) sum[i][j] = mac<E>(weight, lanes[j], sum[i][j]);
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
template <Engine E, int Keys>
CP_INLINE void add_row_channels(const float* weights, const RowRun& run, float* to,
                                std::int64_t to_stride) {
  std::int64_t channel = 0, left = run.row_floats / kLanes;
  while (left > 0) {
    const std::int64_t vectors = left == 4 ? 2 : (left < 3 ? left : 3);
    switch (vectors) {
      case 1:
        add_row_block<E, Keys, 1>(weights, run, channel, to, to_stride);
        break;
      case 2:
        add_row_block<E, Keys, 2>(weights, run, channel, to, to_stride);
        break;
      default:
        add_row_block<E, Keys, 3>(weights, run, channel, to, to_stride);
        break;
    }
    channel += vectors * kLanes;
    left -= vectors;
  }
}

/// `num_keys` <= kPanel keys.
template <Engine E>
__attribute__((noinline)) void add_rows(const float* weights, const RowRun& run,
                                        std::int64_t num_keys, float* to, std::int64_t to_stride) {
  in_pieces<kRegisterRows>(0, num_keys, [&](auto keys, std::int64_t key) CP_INLINE_LAMBDA {
    add_row_channels<E, keys>(weights + key * kWeightStride<E>, run, to + key * to_stride,
                              to_stride);
  });
}

/// add_rows where a row that does not see a key is left out of its sum: of a pair, that half.
template <Engine E>
__attribute__((noinline)) void add_visible_rows(const float* weights, const RowRun& run,
                                                std::int64_t num_keys, const float* limit,
                                                std::int64_t first_key, float* to,
                                                std::int64_t to_stride) {
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const auto number = static_cast<float>(first_key + key);
    for (std::int64_t channel = 0; channel < run.row_floats; channel += kLanes) {
      F sum{};
      for (std::int64_t row = run.begin; row < run.end; ++row) {
        F lanes = load(run.rows + row * run.row_floats + channel);
        if constexpr (E == Engine::f32) {
          if (!(number < limit[row])) continue;
        } else {
          const std::uint32_t low = number < limit[2 * row] ? 0xffffu : 0u;
          const std::uint32_t high = number < limit[2 * row + 1] ? 0xffff0000u : 0u;
          lanes = (F)((I)lanes & (I{} + static_cast<std::int32_t>(low | high)));
        }
        sum = mac<E>(broadcast(weights[key * kWeightStride<E> + row]), lanes, sum);
      }
      float* place = to + key * to_stride + channel;
      store(place, load(place) + sum);
    }
  }
}
