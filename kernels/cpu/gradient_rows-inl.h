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

/// Rows [first_row, first_row + W) at channels [d, d + W) as lanes: square[channel][row]. Rows that
/// saw no key, and those beyond the tile, come out as zeros.
CP_INLINE void load_square(const QueryTileJob& job, const StridedRows& rows, std::int64_t first_row,
                           std::int64_t d, std::int64_t dim, const bool* is_used, F* square) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    square[i] = F{};
    const std::int64_t row = first_row + i;
    if (row < job.num_rows && is_used[row]) {
      square[i] = load_widened(rows.data + row * rows.row_bytes, rows.dtype, d, dim);
    }
  }
}

/// not 0 where a lane is infinite or NaN
CP_INLINE I special_lanes(F v) { return ((I)v & 0x7f800000) == 0x7f800000; }

CP_INLINE bool any_lane(I v) {
  std::int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= v[i];
  return any != 0;
}

void pack_query_tile(const QueryTileJob& job) {
  const std::int64_t head_dim = job.shape->head_dim, value_dim = job.shape->value_dim;
  const QueryTileLayout layout = query_tile_layout(*job.shape);
  const ScoreScale scale = score_scale(job.shape->softmax_scale, Engine::f32);
  const I keep = I{} + static_cast<std::int32_t>(scale.q_keep);
  const I flip = I{} + static_cast<std::int32_t>(scale.q_flip);
  bool is_used[kQueryTile];
  float* lse = job.packed + layout.lse;
  for (std::int64_t row = 0; row < kQueryTile; ++row) {
    const float natural = row < job.num_rows ? job.lse[row * job.lse_stride] : kEmptyMax;
    is_used[row] = natural != kEmptyMax;
    lse[row] = static_cast<float>(static_cast<double>(natural) * kLog2e);
  }
  I specials{};
  for (std::int64_t r = 0; r < kQueryTile; r += kLanes) {
    F square[kLanes], other[kLanes];
    for (std::int64_t d = 0; d < padded_dim(head_dim); d += kLanes) {
      load_square(job, job.q, r, d, head_dim, is_used, square);
      for (int i = 0; i < kLanes; ++i) {
        specials |= special_lanes(square[i]);
        store(job.packed + layout.q_rows + (r + i) * padded_dim(head_dim) + d, square[i]);
      }
      transpose(square);
      for (int i = 0; i < kLanes && d + i < head_dim; ++i) {
        store(job.packed + layout.q_lanes + (d + i) * kLd + r, (F)(((I)square[i] & keep) ^ flip));
      }
    }
    F delta{};
    for (std::int64_t d = 0; d < padded_dim(value_dim); d += kLanes) {
      load_square(job, job.dout, r, d, value_dim, is_used, square);
      for (int i = 0; i < kLanes; ++i) {
        specials |= special_lanes(square[i]);
        store(job.packed + layout.dout_rows + (r + i) * padded_dim(value_dim) + d, square[i]);
      }
      load_square(job, job.out, r, d, value_dim, is_used, other);
      transpose(square);
      transpose(other);
      for (int i = 0; i < kLanes && d + i < panels(value_dim) * kPanel; ++i) {
        store(job.packed + layout.dout_lanes + (d + i) * kLd + r, square[i]);
        if (d + i < value_dim) delta = fma(square[i], other[i], delta);
      }
    }
    store(job.packed + layout.delta + r, delta);
  }
  float* delta = job.packed + layout.delta;
  for (std::int64_t row = 0; job.dlse != nullptr && row < job.num_rows; ++row) {
    if (is_used[row]) delta[row] = delta[row] - job.dlse[row * job.dlse_stride];
  }
  job.packed[layout.specials] = any_lane(specials) ? 1.0f : 0.0f;
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
