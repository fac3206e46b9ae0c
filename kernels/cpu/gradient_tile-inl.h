// The gradients of one query tile x one kv block x one head: p and ds tile by tile, and from them
// dq, dv, dk. Source: FlashAttention-2 (Dao 2023), algorithm 2.

/// How many keys of the block each row of the tile sees; surplus rows as the last one. A row that
/// saw no key at all sees none here either.
struct RowLimits {
  alignas(64) float lanes[kQueryTile];
  std::int64_t smallest;
  std::int64_t largest;
};

void find_limits(const GradientJob& job, const float* lse, RowLimits& limits) {
  limits.smallest = job.num_keys;
  limits.largest = 0;
  for (std::int64_t row = 0; row < kQueryTile; ++row) {
    const std::int64_t in_tile = row < job.num_rows ? row : job.num_rows - 1;
    const std::int64_t limit = lse[in_tile] == kEmptyMax
                                   ? 0
                                   : job.mask.visible_keys(job.first_row + in_tile, job.num_keys);
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

/// Keys [first, first + num_keys) of the block; `panel_keys` the same in whole panels.
struct KeyTile {
  std::int64_t first;
  std::int64_t num_keys;
  std::int64_t panel_keys;
  bool is_masked;  ///< some lane does not see some key of it
};

/// p and ds of one group of lanes.
template <int NQ>
void differentiate_group(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
                         float scale, std::int64_t lane, const GradientScratch& scratch) {
  const std::int64_t head_dim = job.shape->head_dim, value_dim = job.shape->value_dim;
  const QueryTileLayout layout = query_tile_layout(*job.shape);
  const float* queries = job.queries + lane;
  float* weights = scratch.weights + lane;
  float* slopes = scratch.slopes + lane;
  F unused[NQ];
  for (int j = 0; j < NQ; ++j) unused[j] = F{};
  score_keys<Engine::f32, NQ, false>(queries + layout.q_lanes, job.k + tile.first * head_dim,
                                     head_dim, tile.panel_keys, weights, unused, 0.0f, unused);
  dot_values<NQ>(queries + layout.dout_lanes, job.v + tile.first * kPanel, job.num_keys * kPanel,
                 value_dim, tile.num_keys, slopes);
  const auto weigh = tile.is_masked ? weigh_slopes<NQ, true> : weigh_slopes<NQ, false>;
  weigh(weights, slopes, tile.panel_keys, broadcast(scale), queries + layout.lse,
        queries + layout.delta, limits.lanes + lane, tile.first);
}

template <int NQ>
void add_dq_group(const GradientJob& job, const KeyTile& tile, std::int64_t lane,
                  const GradientScratch& scratch) {
  const std::int64_t head_dim = job.shape->head_dim;
  add_keys<NQ>(scratch.slopes + lane, job.k + tile.first * head_dim, head_dim, tile.panel_keys,
               job.dq + lane);
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

CP_INLINE bool is_special(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u;
}

/// Whether a key that some row does not see holds an infinity or a NaN in k.
bool hides_special_keys(const GradientJob& job, const KeyTile& tile, const RowLimits& limits) {
  const std::int64_t head_dim = job.shape->head_dim;
  const std::int64_t end = tile.first + tile.panel_keys;
  if (limits.smallest >= end) return false;
  const std::int64_t begin =
      limits.smallest > tile.first ? limits.smallest / kPanel * kPanel : tile.first;
  bool found = false;
  for (std::int64_t i = begin * head_dim; i < end * head_dim; ++i) found |= is_special(job.k[i]);
  return found;
}

void add_dq(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
            const GradientScratch& scratch) {
  if (hides_special_keys(job, tile, limits)) {
    const std::int64_t head_dim = job.shape->head_dim;
    add_visible_keys(scratch.slopes, job.k + tile.first * head_dim, head_dim, tile.num_keys,
                     limits.lanes, tile.first, vectors_of(job.num_rows), job.dq);
    return;
  }
  for_each_group(job.num_rows, [&](auto vectors, std::int64_t lane) {
    add_dq_group<vectors>(job, tile, lane, scratch);
  });
}

/// dv and dk, panel by panel. Rows before the first that sees a panel's first key see none of it:
/// leaving them out changes no bit, since their terms would be the first of each sum, and 0.
void add_dkv(const GradientJob& job, const KeyTile& tile, const RowLimits& limits,
             const GradientScratch& scratch) {
  const QueryTileLayout layout = query_tile_layout(*job.shape);
  const std::int64_t dk_floats = padded_dim(job.shape->head_dim);
  const std::int64_t dv_floats = padded_dim(job.shape->value_dim);
  const std::int64_t stride = dk_floats + dv_floats;
  const bool has_specials = job.queries[layout.specials] != 0.0f;
  for (std::int64_t key = 0; key < tile.num_keys; key += kPanel) {
    const std::int64_t first = tile.first + key;
    const std::int64_t keys = tile.num_keys - key < kPanel ? tile.num_keys - key : kPanel;
    const std::int64_t row = first_row_that_sees(job, first);
    const RowRun dout{job.queries + layout.dout_rows, dv_floats, row, job.num_rows};
    const RowRun q{job.queries + layout.q_rows, dk_floats, row, job.num_rows};
    float* dk = job.dkv + first * stride;
    const float* weights = scratch.weights + key * kLd;
    const float* slopes = scratch.slopes + key * kLd;
    if (has_specials && first + keys > limits.smallest) {
      add_visible_rows(weights, dout, keys, limits.lanes, first, dk + dk_floats, stride);
      add_visible_rows(slopes, q, keys, limits.lanes, first, dk, stride);
    } else {
      add_rows(weights, dout, keys, dk + dk_floats, stride);
      add_rows(slopes, q, keys, dk, stride);
    }
  }
}

void run_gradient(const GradientJob& job, const GradientScratch& scratch) {
  RowLimits limits;
  find_limits(job, job.queries + query_tile_layout(*job.shape).lse, limits);
  const float scale = score_scale(job.shape->softmax_scale, Engine::f32).multiplier;
  for (std::int64_t first = 0; first < limits.largest; first += kKeyTile) {
    KeyTile tile;
    tile.first = first;
    tile.num_keys = limits.largest - first < kKeyTile ? limits.largest - first : kKeyTile;
    tile.panel_keys = panels(tile.num_keys) * kPanel;
    tile.is_masked = first + tile.panel_keys > limits.smallest;
    for_each_group(job.num_rows, [&](auto vectors, std::int64_t lane) {
      differentiate_group<vectors>(job, tile, limits, scale, lane, scratch);
    });
    add_dq(job, tile, limits, scratch);
    add_dkv(job, tile, limits, scratch);
    job.progress();
  }
}
