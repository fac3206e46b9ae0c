// The backward's rows in and out: query tiles into packed form with delta, sums of leaves, and
// finished gradients to the caller's type.

/// Elements [d, d + W) of a row as f32, zeros beyond `dim`.
CP_INLINE F load_widened(const std::byte* row, DType dtype, std::int64_t d, std::int64_t dim) {
  if (d >= dim) return F{};
  const std::int64_t size = dtype == DType::f32 ? 4 : 2;
  const std::byte* from = row + d * size;
  alignas(64) std::byte tail[4 * kLanes];
  if (dim - d < kLanes) {
    std::memset(tail, 0, sizeof(tail));
    std::memcpy(tail, from, static_cast<std::size_t>((dim - d) * size));
    from = tail;
  }
  switch (dtype) {
    case DType::f16:
      return widen_f16(from);
    case DType::bf16:
      return widen_bf16(from);
    case DType::f32:
      break;
  }
  return load_unaligned(from);
}

CP_INLINE I special_lanes(F v) { return ((I)v & 0x7f800000) == 0x7f800000; }

CP_INLINE bool any_lane(I v) {
  std::int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= v[i];
  return any != 0;
}

/// The two numbers of a pair, which are bf16 already, side by side.
CP_INLINE F pair_up(F low, F high) {
  return (F)((((I)low >> 16) & 0xffff) | ((I)high & static_cast<std::int32_t>(0xffff0000u)));
}

/// A packed tile while it is made.
template <Engine E>
struct QueryPacker {
  const QueryTileJob& job;
  bool is_used[kQueryTile];  ///< rows of the tile that saw a key
  I specials{};

  /// Rows [first_row, first_row + W) at channels [d, d + W), in the precision that is multiplied.
  /// Rows that saw no key, and those beyond the tile, come out as zeros.
  CP_INLINE void load_square(const StridedRows& rows, std::int64_t first_row, std::int64_t d,
                             std::int64_t dim, F* square) {
    for (int i = 0; i < kLanes; ++i) {
      square[i] = F{};
      const std::int64_t row = first_row + i;
      if (row >= job.num_rows || !is_used[row]) continue;
      square[i] = load_widened(rows.data + row * rows.row_bytes, rows.dtype, d, dim);
    }
  }

  CP_INLINE void round_square(F* square) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (E == Engine::bf16_pair) square[i] = (F)(round_bf16(square[i]) << 16);
      specials |= special_lanes(square[i]);
    }
  }

  /// A square of rows to its place in [row][channel], `to` at (first row, d).
  CP_INLINE void store_rows(const F* square, std::int64_t row_floats, float* to) {
    if constexpr (E == Engine::f32) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + i * row_floats, square[i]);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; i += 2) {
        store(to + i / 2 * row_floats, pair_up(square[i], square[i + 1]));
      }
    }
  }

  /// A square of channels from d on to its place in [step][row], `to` at (0, first row).
  CP_INLINE void store_lanes(const F* square, std::int64_t d, std::int64_t num_steps,
                             const ScoreScale& scale, float* to) {
    constexpr int kStep = E == Engine::f32 ? 1 : 2;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += kStep) {
      if ((d + i) / kStep >= num_steps) continue;
      const F element = E == Engine::f32 ? square[i] : pair_up(square[i], square[i + kStep - 1]);
      store(to + (d + i) / kStep * kLd, signed_query(element, scale, E));
    }
  }
};

/// Heads lie a stride apart that hardware does not follow: ask for all rows before reading any.
CP_INLINE void prefetch_rows(const StridedRows& rows, std::int64_t num_rows, std::int64_t dim) {
  const std::int64_t bytes = dim * (rows.dtype == DType::f32 ? 4 : 2);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(rows.data + row * rows.row_bytes + i);
    }
  }
}

template <Engine E>
void pack_tile_queries(const QueryTileJob& job) {
  const std::int64_t head_dim = job.shape->head_dim, value_dim = job.shape->value_dim;
  const QueryTileLayout layout = query_tile_layout(E, *job.shape);
  const std::int64_t value_steps = (layout.dout_rows - layout.dout_lanes) / kQueryTile;
  const ScoreScale scale = score_scale(job.shape->softmax_scale, E);
  const ScoreScale unsigned_scale{1.0f, false, 0u};  // of dout
  prefetch_rows(job.q, job.num_rows, head_dim);
  prefetch_rows(job.dout, job.num_rows, value_dim);
  prefetch_rows(job.out, job.num_rows, value_dim);
  QueryPacker<E> packer{job, {}};
  float* lse = job.packed + layout.lse;
  float* delta = job.packed + layout.delta;
  for (std::int64_t row = 0; row < kQueryTile; ++row) {
    const float natural = row < job.num_rows ? job.lse[row * job.lse_stride] : kEmptyMax;
    packer.is_used[row] = natural != kEmptyMax;
    lse[row] = static_cast<float>(static_cast<double>(natural) * kLog2e);
  }
  for (std::int64_t r = 0; r < kQueryTile; r += kLanes) {
    const std::int64_t row = r / rows_per_element(E);
    F square[kLanes], out[kLanes];
    for (std::int64_t d = 0; d < padded_dim(head_dim); d += kLanes) {
      packer.load_square(job.q, r, d, head_dim, square);
      packer.round_square(square);
      packer.store_rows(square, padded_dim(head_dim),
                        job.packed + layout.q_rows + row * padded_dim(head_dim) + d);
      transpose(square);
      packer.store_lanes(square, d, steps_of(E, head_dim), scale, job.packed + layout.q_lanes + r);
    }
    F sum{};
    for (std::int64_t d = 0; d < padded_dim(value_dim); d += kLanes) {
      packer.load_square(job.dout, r, d, value_dim, square);
      packer.round_square(square);
      packer.store_rows(square, padded_dim(value_dim),
                        job.packed + layout.dout_rows + row * padded_dim(value_dim) + d);
      packer.load_square(job.out, r, d, value_dim, out);
      transpose(square);
      transpose(out);
      packer.store_lanes(square, d, value_steps, unsigned_scale,
                         job.packed + layout.dout_lanes + r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (d + i < value_dim) sum = fma(square[i], out[i], sum);
      }
    }
    store(delta + r, sum);
  }
  for (std::int64_t row = 0; job.dlse != nullptr && row < job.num_rows; ++row) {
    if (packer.is_used[row]) delta[row] = delta[row] - job.dlse[row * job.dlse_stride];
  }
  job.packed[layout.specials] = any_lane(packer.specials) ? 1.0f : 0.0f;
}

void pack_query_tile(const QueryTileJob& job) {
#if defined(__AVX512BF16__)
  if (job.engine == Engine::bf16_pair) {
    pack_tile_queries<Engine::bf16_pair>(job);
    return;
  }
#endif
  pack_tile_queries<Engine::f32>(job);
}

void add(const float* left, const float* right, std::int64_t count, float* dst) {
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < count; i += kLanes) store(dst + i, load(left + i) + load(right + i));
}

/// Zeros are +0.
CP_INLINE F finished(F sum, float scale) { return sum * broadcast(scale) + F{}; }

void finish_lanes(const float* lanes, const FinishedRows& to) {
  for (std::int64_t r = 0; r < to.num_rows; r += kLanes) {
    const std::int64_t rows = to.num_rows - r < kLanes ? to.num_rows - r : kLanes;
    for (std::int64_t d = 0; d < to.dim; d += kLanes) {
      const std::int64_t channels = to.dim - d < kLanes ? to.dim - d : kLanes;
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = i < channels ? finished(load(lanes + (d + i) * kLd + r), to.scale) : F{};
      }
      transpose(square);
      for (std::int64_t i = 0; i < rows; ++i) {
        store_out(to.data + (r + i) * to.row_bytes, to.dtype, d, channels, square[i]);
      }
    }
  }
}

void finish_rows(const float* rows, std::int64_t row_floats, const FinishedRows& to) {
  for (std::int64_t row = 0; row < to.num_rows; ++row) {
    for (std::int64_t d = 0; d < to.dim; d += kLanes) {
      const std::int64_t channels = to.dim - d < kLanes ? to.dim - d : kLanes;
      store_out(to.data + row * to.row_bytes, to.dtype, d, channels,
                finished(load(rows + row * row_floats + d), to.scale));
    }
  }
}

constexpr GradientTileKernels kGradientKernels{pack_query_tile, run_gradient, add, finish_lanes,
                                               finish_rows};
