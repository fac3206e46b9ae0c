// The kernel of forward_sm80.h.
//
// A thread block of four warps does one row tile of one head at a time; a warp owns one or two
// strips of 16 rows and shares nothing with the others but q, k and v in shared memory. Half tiles
// (the keys of a tile, then its values) pass through a ring of slots: while one is multiplied,
// cp.async fills the others. Source: FlashAttention-2 (Dao 2023), algorithm 1.
#pragma once

#include "kernels/cuda/forward_params.h"

namespace cpattn::cuda::sm80 {

/// Faults that tests plant; production has none.
enum class Fault {
  none,
  no_barrier_after_wait,
  wait_for_too_few,
  no_barrier_before_refill,
  limit_one_too_many,
  hidden_values_as_numbers,
};

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr std::uint32_t kRowBytes = 2 * kPanelColumns;  ///< of a panel

/// Head sizes of up to 64 kPanels channels. Chosen so that registers do not spill and shared memory
/// stays within 99 KiB, the least that any of the architectures has. Bits do not depend on it.
template <class T_, int kPanels_, Fault kFault_ = Fault::none>
struct Config {
  using T = T_;
  static constexpr int kPanels = kPanels_;
  static constexpr Fault kFault = kFault_;
  static constexpr int kStrips = kPanels == 1 ? 2 : 1;  ///< of a warp
  static constexpr int kTileRows = kStripRows * kStrips * kWarps;
  static constexpr int kSlots = kPanels == 1 ? 4 : kPanels == 2 ? 3 : 2;  ///< of the ring
};

/// Bytes of shared memory: q, then the ring.
template <class C>
CP_SHARED_BY_HOST constexpr std::uint32_t query_bytes(const KvForm& form) {
  return static_cast<std::uint32_t>(form.k_panels) * C::kTileRows * kRowBytes;
}
CP_SHARED_BY_HOST constexpr std::uint32_t slot_bytes(const KvForm& form) {
  return static_cast<std::uint32_t>(form.k_panels > form.v_panels ? form.k_panels : form.v_panels) *
         kPanelBytes;
}

/// Lane addresses for ldmatrix.x4 in a panel: the four matrices of a 16x16 square whose rows begin
/// at a multiple of 16, `columns_first` or rows first. Steps of 16 columns are an xor, since the
/// swizzle leaves bits 5 and 6 free of the row.
struct SquareLane {
  std::uint32_t row_bytes;
  std::uint32_t column_bits;

  CP_DEVICE explicit SquareLane(bool columns_first) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t low = lane / 8 % 2, high = lane / 16;
    const std::uint32_t row = lane % 8 + 8 * (columns_first ? high : low);
    row_bytes = row * kRowBytes;
    column_bits = ((columns_first ? low : high) ^ lane % 8) << 4;
  }
  /// Byte of the lane's row of the square at column 16 `step` of the panel.
  CP_DEVICE std::uint32_t operator()(std::uint32_t step) const {
    return row_bytes + (column_bits ^ step << 5);
  }
};

/// The tile's rows of q, panel by panel, in shared memory; rows that do not exist are zero.
template <class C>
CP_DEVICE void load_queries(const ForwardParams& params, const ForwardItem& item, std::byte* to) {
  constexpr int kRowPieces = kPanelColumns / kPieceChannels;
  const int pieces = params.form.k_panels * C::kTileRows * kRowPieces;
  const std::int64_t first_row = item.program->row_begin + item.first_row;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) {
    const int row = i / kRowPieces % C::kTileRows, panel = i / kRowPieces / C::kTileRows;
    const int channel = i % kRowPieces * kPieceChannels;
    Piece piece{};
    if (row < item.num_rows && panel * kPanelColumns + channel < params.q.dim) {
      piece = scaled_query<typename C::T>(
          load_piece(params.q, first_row + row, item.head, panel * kPanelColumns + channel),
          params.scale);
    }
    const std::uint32_t plain =
        static_cast<std::uint32_t>(row) * kRowBytes + static_cast<std::uint32_t>(channel) * 2;
    *reinterpret_cast<Piece*>(to + panel * C::kTileRows * static_cast<int>(kRowBytes) +
                              swizzled(plain, Swizzle::bytes128)) = piece;
  }
}

/// The ring: half tiles [0, num_halves) of one block of keys, even ones keys, odd ones values.
template <class C>
struct Ring {
  ptx::SharedAddress first_slot = 0;
  std::uint32_t slot_size = 0;
  const std::byte* source = nullptr;  ///< of the next half to be asked for
  int num_left = 0;                   ///< halves not asked for
  int next_slot = 0;
  bool is_values = false;

  /// Asks for the next half, if there is one; a group of copies either way.
  CP_DEVICE void ask(const KvForm& form) {
    if (num_left > 0) {
      const int panels = is_values ? form.v_panels : form.k_panels;
      const std::uint32_t offset = threadIdx.x * 16;
      const ptx::SharedAddress to =
          first_slot + static_cast<std::uint32_t>(next_slot) * slot_size + offset;
      for (int panel = 0; panel < panels; ++panel) {
        CP_UNROLL
        for (int i = 0; i < kPanelBytes / (16 * kThreads); ++i) {
          const int at = panel * kPanelBytes + i * 16 * kThreads;
          ptx::copy_async16(to + static_cast<std::uint32_t>(at), source + offset + at, true);
        }
      }
      source += panels * kPanelBytes;
      is_values = !is_values;
      --num_left;
      next_slot = next_slot + 1 == C::kSlots ? 0 : next_slot + 1;
    }
    ptx::commit_copies();
  }

  /// Half number `half` is there for all threads, and the slot of the one before is free: it is
  /// filled again.
  CP_DEVICE void advance(const KvForm& form) {
    constexpr int kNewest = C::kSlots - 2;
    ptx::wait_copies<C::kFault == Fault::wait_for_too_few ? kNewest + 1 : kNewest>();
    if (C::kFault == Fault::no_barrier_before_refill) ask(form);
    if (C::kFault != Fault::no_barrier_after_wait) __syncthreads();
    if (C::kFault != Fault::no_barrier_before_refill) ask(form);
  }
};

/// Keys of the tile at hand that the warp's rows see: row i of the warp sees [0, first + i), at
/// most `num_keys`.
struct Visible {
  int first = 0;     ///< may be negative, or beyond the tile
  int num_keys = 0;  ///< of the block from this tile on
  int num_rows = 0;  ///< of the warp that exist

  CP_DEVICE int of_row(int row) const { return first + row < num_keys ? first + row : num_keys; }
  /// That any row sees; 0 for a warp without rows.
  CP_DEVICE int of_any() const { return num_rows > 0 ? of_row(num_rows - 1) : 0; }
  CP_DEVICE int of_all() const { return of_row(0); }
};

/// Scores of the warp's strips: as accumulators, key 8 n + 2 t and the next one.
template <class C>
using Scores = float[C::kStrips][kTileRows / 8][4];

template <class C>
CP_DEVICE void multiply_keys(const ForwardParams& params, ptx::SharedAddress q,
                             ptx::SharedAddress k, Scores<C>& s) {
  const SquareLane q_lane(false), k_lane(true);
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      CP_UNROLL
      for (int i = 0; i < 4; ++i) s[strip][n][i] = 0.0f;
    }
  }
  const int num_steps = (params.q.dim + 15) / 16;
  CP_UNROLL_BY(2)
  for (int step = 0; step < num_steps; ++step) {
    const auto panel = static_cast<std::uint32_t>(step / 4),
               within = static_cast<std::uint32_t>(step % 4);
    std::uint32_t a[C::kStrips][4];
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) {
      ptx::load_matrices(a[strip], q + panel * C::kTileRows * kRowBytes +
                                       static_cast<std::uint32_t>(strip) * kStripRows * kRowBytes +
                                       q_lane(within));
    }
    CP_UNROLL
    for (int pair = 0; pair < kTileRows / 16; ++pair) {
      std::uint32_t b[4];
      ptx::load_matrices(b, k + panel * kPanelBytes +
                                static_cast<std::uint32_t>(pair) * 16 * kRowBytes + k_lane(within));
      CP_UNROLL
      for (int strip = 0; strip < C::kStrips; ++strip) {
        ptx::multiply(s[strip][2 * pair], a[strip], b[0], b[1], typename C::T{});
        ptx::multiply(s[strip][2 * pair + 1], a[strip], b[2], b[3], typename C::T{});
      }
    }
  }
}

template <class C>
CP_DEVICE void hide_keys(const Visible& visible, Scores<C>& s) {
  const StripLane lane;
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int limit = visible.of_row(strip * kStripRows + lane.row + i / 2 * 8) +
                        (C::kFault == Fault::limit_one_too_many ? 1 : 0);
      CP_UNROLL
      for (int n = 0; n < kTileRows / 8; ++n) {
        if (8 * n + lane.channel + i % 2 >= limit) s[strip][n][i] = -INFINITY;
      }
    }
  }
}

/// Scores to weights 2^(s scale - m), and the state to the new maximum. l is the lane's share.
template <class C>
CP_DEVICE void weigh_keys(float scale, Accumulator<C::kPanels>& a, float (&s)[kTileRows / 8][4]) {
  CP_UNROLL
  for (int half = 0; half < 2; ++half) {
    float best = -INFINITY;
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      best = fmaxf(best, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
    const float m = fmaxf(a.m[half], best * scale);
    // A row that has seen nothing yet keeps m = -inf; its weights are taken against 0, so they are
    // 0.
    const float safe_m = -INFINITY < m ? m : 0.0f;
    const float alpha = ptx::exp2_approximate(a.m[half] - safe_m);
    a.m[half] = m;
    float sum = 0.0f;
    CP_UNROLL
    for (int n = 0; n < kTileRows / 8; ++n) {
      CP_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        s[n][i] = ptx::exp2_approximate(fmaf(s[n][i], scale, -safe_m));
        sum += s[n][i];
      }
    }
    a.l[half] = fmaf(a.l[half], alpha, sum);
    CP_UNROLL
    for (int n = 0; n < Accumulator<C::kPanels>::kColumnTiles; ++n) {
      a.o[n][2 * half] *= alpha;
      a.o[n][2 * half + 1] *= alpha;
    }
  }
}

/// Rows of a 16x16 square of P as 1 where the row sees the key, else 0. `seen(row)`: how many.
template <class T, class Seen>
CP_DEVICE void mark_visible(const Seen& seen, std::uint32_t (&a)[4]) {
  const StripLane lane;
  CP_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int key = lane.channel + i / 2 * 8, limit = seen(lane.row + i % 2 * 8);
    a[i] = ptx::pack(key < limit ? 1.0f : 0.0f, key + 1 < limit ? 1.0f : 0.0f, T{});
  }
}

/// o becomes NaN where a row sees a key whose value is not finite: `special` has ones there.
template <class T>
CP_DEVICE void add_special_values(const std::uint32_t (&marks)[4], std::uint32_t special0,
                                  std::uint32_t special1, float (&o)[4]) {
  float seen[4] = {};
  ptx::multiply(seen, marks, special0, special1, T{});
  CP_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = seen[i] > 0.0f ? NAN : o[i];
}

/// o += P V for keys [16 step, 16 step + 16). P is rounded to the 16-bit type here; it lies in
/// registers as the product wants it. kIsPartial: some rows do not see some of the keys, and 0
/// times NaN is not 0, so values that are not finite are taken out of the product.
template <class C, bool kIsPartial>
CP_DEVICE void multiply_value_step(const KvForm& form, const Visible& visible, int step,
                                   ptx::SharedAddress v, const Scores<C>& s,
                                   Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  using T = typename C::T;
  const SquareLane v_lane(false);
  std::uint32_t p[C::kStrips][4];
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float(&pair)[4] = s[strip][2 * step + i / 2];
      p[strip][i] = ptx::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1], T{});
    }
  }
  CP_UNROLL
  for (int n = 0; n < 4 * C::kPanels; ++n) {
    if (n / 4 >= form.v_panels) break;
    std::uint32_t b[4];
    ptx::load_transposed(b, v + static_cast<std::uint32_t>(n / 4 * kPanelBytes) +
                                static_cast<std::uint32_t>(step) * 16 * kRowBytes +
                                v_lane(static_cast<std::uint32_t>(n % 4)));
    if (kIsPartial) {
      std::uint32_t special[4];
      CP_UNROLL
      for (int i = 0; i < 4; ++i) {
        special[i] = special_halves<T>(b[i]);
        b[i] &= ~special[i];
        special[i] &= kOnes<T>;
      }
      if (__any_sync(kAllLanes, (special[0] | special[1] | special[2] | special[3]) != 0) != 0) {
        CP_UNROLL
        for (int strip = 0; strip < C::kStrips; ++strip) {
          std::uint32_t marks[4];
          mark_visible<T>(
              [&](int row) { return visible.of_row(strip * kStripRows + row) - 16 * step; }, marks);
          add_special_values<T>(marks, special[0], special[1], acc[strip].o[2 * n]);
          add_special_values<T>(marks, special[2], special[3], acc[strip].o[2 * n + 1]);
        }
      }
    }
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) {
      ptx::multiply(acc[strip].o[2 * n], p[strip], b[0], b[1], T{});
      ptx::multiply(acc[strip].o[2 * n + 1], p[strip], b[2], b[3], T{});
    }
  }
}

template <class C>
CP_DEVICE void multiply_values(const KvForm& form, const Visible& visible, ptx::SharedAddress v,
                               const Scores<C>& s, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  CP_UNROLL
  for (int step = 0; step < kTileRows / 16; ++step) {
    if (16 * step >= visible.of_any()) break;
    if (C::kFault == Fault::hidden_values_as_numbers || 16 * (step + 1) <= visible.of_all()) {
      multiply_value_step<C, false>(form, visible, step, v, s, acc);
    } else {
      multiply_value_step<C, true>(form, visible, step, v, s, acc);
    }
  }
}

/// The accumulators go on over one block of keys. Called by all threads of the block.
template <class C>
CP_DEVICE void attend(const ForwardParams& params, const ForwardItem& item, const TileOp& op,
                      ptx::SharedAddress shared, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  const StepImage& image = *params.image;
  const KeyBlock block = image.part<KeyBlock>(image.kv_blocks)[op.kv_block];
  const auto num_keys = static_cast<int>(block.num_keys);
  const int first_limit = op.first_row_limit + item.first_row;  // keys that the tile's row 0 sees
  const int last_limit = first_limit + item.num_rows - 1;
  const int seen_keys = last_limit < num_keys ? last_limit : num_keys;
  const int num_tiles = seen_keys > 0 ? (seen_keys + kTileRows - 1) / kTileRows : 0;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * C::kStrips * kStripRows;
  const ptx::SharedAddress q = shared + static_cast<std::uint32_t>(warp_row) * kRowBytes;

  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      // Until the block's end l is in shares: what came before is the first lane's.
      if (threadIdx.x % 4 != 0) acc[strip].l[half] = 0.0f;
    }
  }
  Ring<C> ring{
      .first_slot = shared + query_bytes<C>(params.form),
      .slot_size = slot_bytes(params.form),
      .source = block.packed + item.head / params.group_size * params.form.head_bytes(num_keys),
      .num_left = 2 * num_tiles};
  __syncthreads();  // q is there, and no warp reads the last block's values
  CP_UNROLL
  for (int i = 0; i < C::kSlots - 1; ++i) ring.ask(params.form);
  int slot = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const Visible visible{first_limit + warp_row - tile * kTileRows, num_keys - tile * kTileRows,
                          item.num_rows - warp_row};
    const bool sees_any = visible.of_any() > 0;  // a tile that no row sees would change no bit
    Scores<C> s;
    ring.advance(params.form);
    if (sees_any) {
      multiply_keys<C>(params, q,
                       ring.first_slot + static_cast<std::uint32_t>(slot) * ring.slot_size, s);
      if (visible.of_all() < kTileRows) hide_keys<C>(visible, s);
      CP_UNROLL
      for (int strip = 0; strip < C::kStrips; ++strip) {
        weigh_keys<C>(params.scale.multiplier, acc[strip], s[strip]);
      }
    }
    slot = slot + 1 == C::kSlots ? 0 : slot + 1;
    ring.advance(params.form);
    if (sees_any) {
      multiply_values<C>(params.form, visible,
                         ring.first_slot + static_cast<std::uint32_t>(slot) * ring.slot_size, s,
                         acc);
    }
    slot = slot + 1 == C::kSlots ? 0 : slot + 1;
  }
  ptx::wait_copies<0>();
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    CP_UNROLL
    for (int half = 0; half < 2; ++half) {
      float& l = acc[strip].l[half];
      l += __shfl_xor_sync(kAllLanes, l, 1);
      l += __shfl_xor_sync(kAllLanes, l, 2);
    }
  }
}

template <class C>
CP_DEVICE void execute(const ForwardParams& params, const ForwardItem& item, const TileOp& op,
                       ptx::SharedAddress shared, Accumulator<C::kPanels> (&acc)[C::kStrips]) {
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * C::kStrips * kStripRows;
  if (op.kind == TileOpKind::block) {
    CP_UNROLL
    for (int strip = 0; strip < C::kStrips; ++strip) clear(acc[strip]);
  }
  if (op.kind == TileOpKind::block || op.kind == TileOpKind::accumulate) {
    attend<C>(params, item, op, shared, acc);
    return;
  }
  CP_UNROLL
  for (int strip = 0; strip < C::kStrips; ++strip) {
    const int row = warp_row + strip * kStripRows;
    switch (op.kind) {
      case TileOpKind::block:
      case TileOpKind::accumulate:
        break;
      case TileOpKind::load:
        load_states(acc[strip], strip_of_slot(params, item, op.slot, row));
        break;
      case TileOpKind::merge_left:
      case TileOpKind::merge_right:
        merge_states(acc[strip], strip_of_slot(params, item, op.slot, row),
                     op.kind == TileOpKind::merge_left ? SlotSide::left : SlotSide::right);
        break;
      case TileOpKind::store:
        store_states(acc[strip], strip_of_slot(params, item, op.slot, row));
        break;
      case TileOpKind::finalize:
      case TileOpKind::finalize_empty: {
        if (op.kind == TileOpKind::finalize_empty) clear(acc[strip]);
        const StripOfResult result = strip_of_result(params, item, row);
        if (params.head_maxima != nullptr) {
          const float largest = largest_logit(acc[strip], result.num_rows);
          if (threadIdx.x % 32 == 0) raise_maximum(params.head_maxima + item.head, largest);
        }
        finalize_states(acc[strip], result);
        break;
      }
    }
  }
}

/// Blocks take items in turn: those of one block are as far apart as there are blocks.
template <class C>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  CP_DYNAMIC_SMEM(memory);
  const StepImage& image = *params.image;
  const std::int64_t num_items = std::int64_t{image.num_tiles} * params.num_heads;
  for (std::int64_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const ForwardItem item = forward_item(params, i, C::kTileRows);
    load_queries<C>(params, item, memory);
    Accumulator<C::kPanels> acc[C::kStrips];
    for (std::int32_t place = item.program->op_begin; place < item.program->op_end; ++place) {
      execute<C>(params, item, image.part<TileOp>(image.ops)[place], ptx::shared_address(memory),
                 acc);
    }
  }
}

template <class C>
std::size_t shared_bytes(const KvForm& form) {
  return query_bytes<C>(form) + std::size_t{C::kSlots} * slot_bytes(form);
}

}  // namespace cpattn::cuda::sm80
