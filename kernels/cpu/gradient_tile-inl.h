// The gradients of one query tile x one kv block x one head: p and ds tile by tile, and from them
// dq, dv, dk. Source: FlashAttention-2 (Dao 2023), algorithm 2.

/// How many keys of the block each row of the tile sees, 0 for surplus rows. A row that saw no key
/// at all sees none here either. `by_mask`: what the mask alone says, surplus rows as the last one,
/// so it does not decrease.
struct RowLimits {
  alignas(64) float lanes[kQueryTile];
  alignas(64) float by_mask[kQueryTile];
  std::int64_t smallest;  ///< of the tile's own rows
  std::int64_t largest;
};

void find_limits(const GradientJob& job, const float* lse, RowLimits& limits) {
  const std::int64_t num_keys = job.block->num_keys;
  limits.smallest = num_keys;
  limits.largest = 0;
  for (std::int64_t row = 0; row < kQueryTile; ++row) {
    const std::int64_t in_tile = row < job.num_rows ? row : job.num_rows - 1;
    const std::int64_t by_mask = job.mask.visible_keys(job.first_row + in_tile, num_keys);
    limits.by_mask[row] = static_cast<float>(by_mask);
    limits.lanes[row] = 0.0f;
    if (row >= job.num_rows) continue;
    const std::int64_t limit = lse[row] == kEmptyMax ? 0 : by_mask;
    limits.lanes[row] = static_cast<float>(limit);
    limits.smallest = limit < limits.smallest ? limit : limits.smallest;
    limits.largest = limit > limits.largest ? limit : limits.largest;
  }
}

/// The first row of the tile that sees this key.
CP_INLINE std::int64_t first_row_that_sees(const GradientJob& job, std::int64_t key) {
  if (job.mask.kind == MaskKind::full) return 0;
  const std::int64_t row = key + 1 - job.mask.first_row_limit - job.first_row;
  return row < 0 ? 0 : (row < job.num_rows ? row : job.num_rows);
}

/// Keys [first, first + num_keys) of the block: where their k and v begin.
struct KeyTile {
  std::int64_t first;
  std::int64_t num_keys;
  std::int64_t panel_keys;  ///< num_keys in whole panels
  bool is_masked;           ///< some lane does not see some key of the panels
  const float* k;
  const float* v;
  const float* k_by_channels;  ///< bf16_pair only
};

template <Engine E>
KeyTile key_tile(const GradientJob& job, const RowLimits& limits, std::int64_t first) {
  const std::int64_t keys = job.block->num_keys;
  const std::int64_t steps = steps_of(E, job.shape->head_dim);
  const std::int64_t left = limits.largest - first;
  KeyTile tile;
  tile.first = first;
  tile.num_keys = left < kKeyTile ? left : kKeyTile;
  tile.panel_keys = panels(tile.num_keys) * kPanel;
  tile.is_masked = first + tile.panel_keys > limits.smallest || job.num_rows < kQueryTile;
  tile.k = job.block->k + (job.kv_head * panels(keys) * kPanel + first) * steps;
  if constexpr (E == Engine::f32) {
    tile.v = job.block->v + (job.kv_head * panels(job.shape->value_dim) * keys + first) * kPanel;
    tile.k_by_channels = nullptr;
  } else {
    const std::int64_t value_steps = steps_of(E, job.shape->value_dim);
    tile.v = job.block->v + (job.kv_head * panels(keys) * kPanel + first) * value_steps;
    tile.k_by_channels =
        job.block->k_by_channels +
        (job.kv_head * panels(job.shape->head_dim) * value_rows(E, keys) + first / 2) * kPanel;
  }
  return tile;
}

/// p and ds of one group of lanes.
template <Engine E, int NQ>
void differentiate_group(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
                         float scale, std::int64_t lane, const GradientScratch& scratch) {
  const QueryTileLayout layout = query_tile_layout(E, *job.shape);
  const std::int64_t steps = steps_of(E, job.shape->head_dim), value_dim = job.shape->value_dim;
  const float* queries = job.queries + lane;
  const SlopeGroup group{scratch.weights + lane,
                         scratch.slopes + lane,
                         scratch.slope_rows + lane / rows_per_element(E),
                         queries + layout.lse,
                         queries + layout.delta,
                         limits.lanes + lane};
  F by_mask[NQ], unused[NQ];
  for (int j = 0; j < NQ; ++j) {
    by_mask[j] = load(limits.by_mask + lane + j * kLanes);
    unused[j] = F{};
  }
  // Masked or not: the same scores of what is seen.
  const auto multiply = tile.is_masked ? score_keys<E, NQ, true> : score_keys<E, NQ, false>;
  const auto first_key = static_cast<float>(tile.first);
  multiply(queries + layout.q_lanes, tile.k, steps, tile.panel_keys, group.weights, by_mask,
           first_key, unused);
  if constexpr (E == Engine::f32) {
    dot_values<NQ>(queries + layout.dout_lanes, tile.v, job.block->num_keys * kPanel, value_dim,
                   tile.num_keys, group.slopes);
  } else {
    multiply(queries + layout.dout_lanes, tile.v, steps_of(E, value_dim), tile.panel_keys,
             group.slopes, by_mask, first_key, unused);
  }
  const auto weigh = tile.is_masked ? weigh_slopes<E, NQ, true> : weigh_slopes<E, NQ, false>;
  weigh(group, tile.panel_keys, broadcast(scale), tile.first);
}

CP_INLINE bool is_special(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u;
}

/// Whether a key that some row does not see holds an infinity or a NaN in k.
template <Engine E>
bool hides_special_keys(const GradientJob& job, const KeyTile& tile, const RowLimits& limits) {
  const std::int64_t head_dim = job.shape->head_dim;
  if (limits.smallest >= tile.first + tile.num_keys) return false;
  const std::int64_t seen = limits.smallest > tile.first ? limits.smallest - tile.first : 0;
  if constexpr (E == Engine::bf16_pair) {
    return has_special_values<E>(tile.k_by_channels, value_rows(E, job.block->num_keys) * kPanel,
                                 head_dim, seen / 2, value_rows(E, tile.num_keys));
  }
  bool found = false;
  for (std::int64_t i = seen / kPanel * kPanel * head_dim; i < tile.panel_keys * head_dim; ++i) {
    found |= is_special(tile.k[i]);
  }
  return found;
}

/// dq of one group of lanes.
template <Engine E, int NQ>
void add_dq_group(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
                  bool hides_specials, std::int64_t lane, const GradientScratch& scratch) {
  const std::int64_t head_dim = job.shape->head_dim;
  const float* slopes = scratch.slopes + lane;
  float* dq = job.dq + lane;
  F limit[NQ], by_mask[NQ], ones[NQ];
  for (int j = 0; j < NQ; ++j) {
    limit[j] = load(limits.lanes + lane + j * kLanes);
    by_mask[j] = load(limits.by_mask + lane + j * kLanes);
    ones[j] = broadcast(1.0f);
  }
  if constexpr (E == Engine::bf16_pair) {
    const std::int64_t stride = value_rows(E, job.block->num_keys) * kPanel;
    const std::int64_t rows = value_rows(E, tile.num_keys);
    if (hides_specials) {
      add_visible_values<E, NQ>(slopes, tile.k_by_channels, stride, head_dim, rows, ones, false,
                                tile.first, limit, dq);
    } else {
      std::int64_t ends[NQ];
      find_row_ends<E, NQ>(by_mask, tile.first, tile.num_keys, ends);
      add_values<E, NQ>(slopes, tile.k_by_channels, stride, head_dim, ends, ones, false, dq);
    }
  } else if (hides_specials) {
    add_visible_keys<NQ>(slopes, tile.k, head_dim, tile.num_keys, limit, tile.first, dq);
  } else {
    add_keys<NQ>(slopes, tile.k, head_dim, tile.panel_keys, dq);
  }
}

/// visit(integral_constant<int, vectors of the group>, first lane) for the groups of a tile.
template <class Visit>
CP_INLINE void for_each_group(std::int64_t num_rows, const Visit& visit) {
  for (std::int64_t lane = 0; lane < num_rows; lane += kGroupVectors * kLanes) {
    switch (group_at(lane, num_rows).num_vectors) {
      case 1:
        visit(std::integral_constant<int, 1>{}, lane);
        break;
      case 2:
        visit(std::integral_constant<int, 2>{}, lane);
        break;
      default:
        visit(std::integral_constant<int, 3>{}, lane);
        break;
    }
  }
}

/// Sets those of keys [first, end) of the leaf to 0 that nothing was added to yet: here, where they
/// are in L1 a moment later, and not all at once.
CP_INLINE void begin_keys(const GradientJob& job, std::int64_t first, std::int64_t end,
                          std::int64_t stride) {
  const std::int64_t begin = *job.num_begun > first ? *job.num_begun : first;
  for (std::int64_t i = begin * stride; i < end * stride; i += kLanes) store(job.dkv + i, F{});
  if (end > *job.num_begun) *job.num_begun = end;
}

/// dv and dk, panel by panel. Rows before the first that sees a panel's first key see none of it:
/// leaving them out changes no bit, since their terms would be the first of each sum, and 0.
template <Engine E>
void add_dkv(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
             const GradientScratch& scratch) {
  const QueryTileLayout layout = query_tile_layout(E, *job.shape);
  const std::int64_t dk_floats = padded_dim(job.shape->head_dim);
  const std::int64_t dv_floats = padded_dim(job.shape->value_dim);
  const std::int64_t stride = dk_floats + dv_floats;
  const bool has_specials = job.queries[layout.specials] != 0.0f;
  const float* slopes = E == Engine::f32 ? scratch.slopes : scratch.slope_rows;
  const std::int64_t end = (job.num_rows + rows_per_element(E) - 1) / rows_per_element(E);
  for (std::int64_t key = 0; key < tile.num_keys; key += kPanel) {
    const std::int64_t first = tile.first + key;
    const std::int64_t keys = tile.num_keys - key < kPanel ? tile.num_keys - key : kPanel;
    const std::int64_t begin = first_row_that_sees(job, first) / rows_per_element(E);
    const RowRun dout{job.queries + layout.dout_rows, dv_floats, begin, end};
    const RowRun q{job.queries + layout.q_rows, dk_floats, begin, end};
    begin_keys(job, first, first + keys, stride);
    float* dk = job.dkv + first * stride;
    const float* p = scratch.weights + key * kWeightStride<E>;
    const float* ds = slopes + key * kWeightStride<E>;
    if (has_specials && first + keys > limits.smallest) {
      add_visible_rows<E>(p, dout, keys, limits.lanes, first, dk + dk_floats, stride);
      add_visible_rows<E>(ds, q, keys, limits.lanes, first, dk, stride);
    } else {
      add_rows<E>(p, dout, keys, dk + dk_floats, stride);
      add_rows<E>(ds, q, keys, dk, stride);
    }
  }
}

template <Engine E>
void run_tile_gradient(const GradientJob& job, const GradientScratch& scratch) {
  RowLimits limits;
  find_limits(job, job.queries + query_tile_layout(E, *job.shape).lse, limits);
  const float scale = score_scale(job.shape->softmax_scale, E).multiplier;
  for (std::int64_t first = 0; first < limits.largest; first += kKeyTile) {
    const KeyTile tile = key_tile<E>(job, limits, first);
    for_each_group(job.num_rows, [&](auto vectors, std::int64_t lane) {
      differentiate_group<E, vectors>(job, tile, limits, scale, lane, scratch);
    });
    const bool hides_specials = hides_special_keys<E>(job, tile, limits);
    for_each_group(job.num_rows, [&](auto vectors, std::int64_t lane) {
      add_dq_group<E, vectors>(job, tile, limits, hides_specials, lane, scratch);
    });
    add_dkv<E>(job, tile, limits, scratch);
    job.progress();
  }
}

void run_gradient(const GradientJob& job, const GradientScratch& scratch) {
#if defined(__AVX512BF16__)
  if (job.engine == Engine::bf16_pair) {
    run_tile_gradient<Engine::bf16_pair>(job, scratch);
    return;
  }
#endif
  run_tile_gradient<Engine::f32>(job, scratch);
}
