// One program on one tile: queries in, blocks and merges along the program, results out.

/// The 3-vector groups of a tile; the last one may have fewer vectors, its surplus lanes hold
/// zeros.
struct Group {
  std::int64_t first_row;
  int num_vectors;
};

CP_INLINE Group group_at(std::int64_t first_row, std::int64_t num_rows) {
  const std::int64_t rows = num_rows - first_row;
  const std::int64_t vectors = (rows + kLanes - 1) / kLanes;
  return {first_row, static_cast<int>(vectors < kGroupVectors ? vectors : kGroupVectors)};
}

CP_INLINE std::int64_t vectors_of(std::int64_t num_rows) {
  return (num_rows + kLanes - 1) / kLanes;
}

/// The multiplier of a dot product in the exponent of 2, made positive so that the largest score is
/// the largest logit: the sign moves into q, exactly; a scale of 0 becomes q * 0 and a multiplier
/// of 1.
struct ScoreScale {
  float multiplier;
  bool is_zero;
  std::uint32_t q_flip;  ///< xor-mask on the elements of q
};

CP_INLINE ScoreScale score_scale(double softmax_scale, Engine engine) {
  const double scale = softmax_scale * kLog2e;
  const float magnitude = static_cast<float>(scale < 0 ? -scale : scale);
  if (magnitude == 0.0f) return {1.0f, true, 0u};
  const std::uint32_t signs = engine == Engine::f32 ? 0x80000000u : 0x80008000u;
  return {magnitude, false, scale < 0 ? signs : 0u};
}

/// Elements of q with the sign of the scale. Times 0 they are 0, or NaN where they are not finite.
CP_INLINE F signed_query(F q, const ScoreScale& scale, Engine engine) {
  const I bits = (I)q;
  if (!scale.is_zero) return (F)(bits ^ (I{} + static_cast<std::int32_t>(scale.q_flip)));
  const auto is_not_finite = [bits](std::int32_t exponent) {
    return (I)((bits & exponent) == (I{} + exponent));  // all bits, a NaN; or none
  };
  const I high = is_not_finite(0x7f800000);
  if (engine == Engine::f32) return (F)high;
  return (F)((high & ~0xffff) | (is_not_finite(0x7f80) & 0xffff));
}

/// Elements [step, step + W) of a q row in compute form, zeros beyond its end.
CP_INLINE F load_query(const TileJob& job, const std::byte* row, std::int64_t step) {
  const bool is_widened = job.dtype != DType::f32 && job.engine == Engine::f32;
  const std::int64_t size = is_widened ? 2 : 4;
  const std::int64_t row_bytes = job.shape->head_dim * (job.dtype == DType::f32 ? 4 : 2);
  const std::int64_t left = row_bytes - step * size;
  const std::byte* from = row + step * size;
  alignas(64) std::byte tail[4 * kLanes];
  if (left < size * kLanes) {
    std::memset(tail, 0, sizeof(tail));
    std::memcpy(tail, from, static_cast<std::size_t>(left));
    from = tail;
  }
  if (!is_widened) return load_unaligned(from);
  return job.dtype == DType::f16 ? widen_f16(from) : widen_bf16(from);
}

/// scratch.q[step][row] from the strided rows of the caller; surplus lanes hold zeros.
void load_queries(const TileJob& job, const ScoreScale& scale, const TileScratch& scratch) {
  const std::int64_t steps = steps_of(job.engine, job.shape->head_dim);
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    // Heads lie a stride apart that hardware does not follow: ask for all rows before reading any.
    for (std::int64_t s = 0; s < steps; s += 16) {
      __builtin_prefetch(job.q + r * job.q_row_bytes + s * 4);
    }
  }
  for (std::int64_t r = 0; r < job.num_rows; r += kLanes) {
    for (std::int64_t s = 0; s < steps; s += kLanes) {
      F square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = F{};
        if (r + i < job.num_rows) square[i] = load_query(job, job.q + (r + i) * job.q_row_bytes, s);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (s + i < steps) {
          store(scratch.q + (s + i) * kLd + r, signed_query(square[i], scale, job.engine));
        }
      }
    }
  }
}

float* state_of(const TileJob& job, const TileScratch& scratch, SlotIndex slot) {
  return is_scratch(slot)
             ? scratch.states + scratch_number(slot) * state_floats(job.shape->value_dim)
             : job.carried + slot * job.carried_slot;
}

template <Engine E, int NQ>
void attend_group(const TileJob& job, const StateOp& op, std::int64_t first_row, float scale,
                  const TileScratch& scratch, float* state) {
  const ComputeBlock& block = job.blocks[op.kv_block];
  const std::int64_t steps = steps_of(E, job.shape->head_dim);
  const std::int64_t value_dim = job.shape->value_dim;
  const std::int64_t last_row = job.num_rows - 1;
  const auto visible = [&](std::int64_t row) {
    const std::int64_t in_tile = row < last_row ? row : last_row;
    return op.mask.visible_keys(job.first_row + in_tile, block.num_keys);
  };
  F limit[NQ];
  for (int j = 0; j < NQ; ++j) {
    for (int i = 0; i < kLanes; ++i) {
      limit[j][i] = static_cast<float>(visible(first_row + j * kLanes + i));
    }
  }
  const std::int64_t v_panel_stride = value_rows(E, block.num_keys) * kPanel;
  const HeadBlock head{block.k + job.kv_head * panels(block.num_keys) * steps * kPanel,
                       block.v + job.kv_head * panels(value_dim) * v_panel_stride, v_panel_stride};
  const GroupState group{state + first_row, state + kLd + first_row, state + 2 * kLd + first_row};
  attend_block<E, NQ>(scratch.q + first_row, head, steps, value_dim, broadcast(scale), limit,
                      visible(first_row), visible(first_row + NQ * kLanes - 1),
                      op.kind == StateOpKind::block, scratch.scores, group, job.progress);
}

template <Engine E>
void attend(const TileJob& job, const StateOp& op, float scale, const TileScratch& scratch) {
  float* state = state_of(job, scratch, op.dst);
  for (std::int64_t row = 0; row < job.num_rows; row += kGroupVectors * kLanes) {
    switch (group_at(row, job.num_rows).num_vectors) {
      case 1:
        attend_group<E, 1>(job, op, row, scale, scratch, state);
        break;
      case 2:
        attend_group<E, 2>(job, op, row, scale, scratch, state);
        break;
      default:
        attend_group<E, 3>(job, op, row, scale, scratch, state);
        break;
    }
  }
}

/// The merge of lse.h on every row of the tile.
void merge(const TileJob& job, const float* left, const float* right, float* dst) {
  const std::int64_t value_dim = job.shape->value_dim;
  for (std::int64_t lane = 0; lane < vectors_of(job.num_rows) * kLanes; lane += kLanes) {
    const F m_left = load(left + lane), m_right = load(right + lane);
    const F m = larger(m_left, m_right);
    const F safe_m = select_less(broadcast(kEmptyMax), m, m, F{});
    const F w_left = exp2_nonpositive<5>(m_left - safe_m);
    const F w_right = exp2_nonpositive<5>(m_right - safe_m);
    const F l_left = load(left + kLd + lane), l_right = load(right + kLd + lane);
    store(dst + lane, m);
    store(dst + kLd + lane, fma(l_right, w_right, l_left * w_left));
#pragma GCC unroll 4
    for (std::int64_t d = 2; d < value_dim + 2; ++d) {
      const F o_left = load(left + d * kLd + lane), o_right = load(right + d * kLd + lane);
      store(dst + d * kLd + lane, fma(o_right, w_right, o_left * w_left));
    }
  }
}

/// `count` lanes of v, rounded to the dtype of out, at element `d` of an out row.
CP_INLINE void store_out(std::byte* row, DType dtype, std::int64_t d, std::int64_t count, F v) {
  const std::int64_t size = dtype == DType::f32 ? 4 : 2;
  alignas(64) std::byte rounded[4 * kLanes];
  std::byte* place = row + d * size;
  std::byte* to = count == kLanes ? place : rounded;
  switch (dtype) {
    case DType::f32:
      store_unaligned(to, v);
      break;
    case DType::f16:
      store_f16(to, v);
      break;
    case DType::bf16:
      store_bf16(to, v);
      break;
  }
  if (to == rounded) std::memcpy(place, rounded, static_cast<std::size_t>(count * size));
}

/// o / l with inverse = 1 / l: one correction of the product by its exact remainder gives the
/// rounded quotient (Markstein 1990) at a tenth of the cost; where the remainder is no number, the
/// product stays.
CP_INLINE F divide(F o, F l, F inverse) {
  const F quotient = o * inverse;
  const F remainder = fma(-quotient, l, o);
  return (remainder == remainder) ? fma(remainder, inverse, quotient) : quotient;
}

/// out = o / l (0 for an empty row, +0 for a zero of either sign) and lse.
void finalize(const TileJob& job, const float* state) {
  const std::int64_t value_dim = job.shape->value_dim;
  for (std::int64_t r = 0; r < job.num_rows; r += kLanes) {
    const F l = load(state + kLd + r);
    const F inverse = broadcast(1.0f) / l;
    const std::int64_t rows = job.num_rows - r < kLanes ? job.num_rows - r : kLanes;
    for (std::int64_t d = 0; d < value_dim; d += kLanes) {
      const std::int64_t channels = value_dim - d < kLanes ? value_dim - d : kLanes;
      F square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const F o = i < channels ? load(state + (2 + d + i) * kLd + r) : F{};
        square[i] = ((l == F{}) ? F{} : divide(o, l, inverse)) + F{};
      }
      transpose(square);
      for (std::int64_t i = 0; i < rows; ++i) {
        store_out(job.out + (r + i) * job.out_row_bytes, job.out_dtype, d, channels, square[i]);
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      job.lse[(r + i) * job.lse_row_stride] = finalize_lse(state[r + i], state[kLd + r + i]);
    }
  }
  if (job.largest_m == nullptr) return;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    const float l = state[kLd + r];  // m passes a NaN by, l does not
    if (l != l) *job.largest_m = l;
    if (state[r] > *job.largest_m) *job.largest_m = state[r];
  }
}

void finalize_empty(const TileJob& job) {
  const std::size_t size = job.out_dtype == DType::f32 ? 4 : 2;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    std::memset(job.out + r * job.out_row_bytes, 0,
                static_cast<std::size_t>(job.shape->value_dim) * size);
    job.lse[r * job.lse_row_stride] = kEmptyMax;
  }
}

template <Engine E>
void run_program(const TileJob& job, const TileScratch& scratch) {
  const ScoreScale scale = score_scale(job.shape->softmax_scale, E);
  bool has_queries = false;
  for (std::int64_t i = 0; i < job.num_ops; ++i) {
    const StateOp& op = job.ops[i];
    switch (op.kind) {
      case StateOpKind::block:
      case StateOpKind::accumulate:
        if (!has_queries) load_queries(job, scale, scratch);
        has_queries = true;
        attend<E>(job, op, scale.multiplier, scratch);
        break;
      case StateOpKind::merge:
        merge(job, state_of(job, scratch, op.left), state_of(job, scratch, op.right),
              state_of(job, scratch, op.dst));
        break;
      case StateOpKind::finalize:
        finalize(job, state_of(job, scratch, op.left));
        break;
      case StateOpKind::finalize_empty:
        finalize_empty(job);
        break;
    }
  }
}

void run_tile(const TileJob& job, const TileScratch& scratch) {
#if defined(__AVX512BF16__)
  if (job.engine == Engine::bf16_pair) {
    run_program<Engine::bf16_pair>(job, scratch);
    return;
  }
#endif
  run_program<Engine::f32>(job, scratch);
}
