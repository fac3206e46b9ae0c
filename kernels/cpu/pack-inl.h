// k and v from the caller's strided rows into panels (tile_kernels.h, ComputeBlock).

template <class Element>
struct Eight;  // 8 elements as one vector
template <>
struct Eight<float> {
  using V = float __attribute__((vector_size(32), may_alias));
};
template <>
struct Eight<std::uint16_t> {
  using V = std::uint16_t __attribute__((vector_size(16), may_alias));
};

template <class V, int Span>
CP_INLINE void transpose8_stage(V* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if ((i & Span) != 0) continue;
    const V a = rows[i], b = rows[i + Span];
    if constexpr (Span == 1) {
      rows[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
      rows[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    } else if constexpr (Span == 2) {
      rows[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      rows[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    } else {
      rows[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
      rows[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
  }
}

/// A cache line of 8 rows, vector j of row i in v[j][i]. Rows of all heads side by side lie a page
/// apart, in one set of the cache: a line that is read piece by piece is gone before its next
/// piece is wanted, so whole lines are read at once (measured: a third of the time of packing).
template <class Element>
struct EightLines {
  using V = typename Eight<Element>::V;
  static constexpr int kVectors = 64 / sizeof(V);
  static constexpr std::int64_t kElements = kVectors * kPanel;

  CP_INLINE void load(const std::byte* from, std::int64_t row_bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kPanel; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        std::memcpy(&v[j][i], from + i * row_bytes + j * sizeof(V), sizeof(V));
      }
    }
  }

  V v[kVectors][kPanel];
};

/// The first `bytes` of a vector, all of them where there are more; zeros behind them.
template <class V>
CP_INLINE V load_eight(const std::byte* from, std::int64_t bytes) {
  V v{};
  if (bytes >= static_cast<std::int64_t>(sizeof(V))) {
    std::memcpy(&v, from, sizeof(V));
  } else {
    std::memcpy(&v, from, static_cast<std::size_t>(bytes));
  }
  return v;
}

template <class V, class Element>
CP_INLINE void store_eight(const V* rows, Element* to) {
#pragma GCC unroll 8
  for (int i = 0; i < kPanel; ++i) std::memcpy(to + i * kPanel, &rows[i], sizeof(V));
}

template <class V>
CP_INLINE void transpose8(V* rows) {
  transpose8_stage<V, 1>(rows);
  transpose8_stage<V, 2>(rows);
  transpose8_stage<V, 4>(rows);
}

/// One panel of `keys` <= 8 rows of `steps` elements: to[step][key], missing keys 0. A row holds
/// `stored` bytes, which is fewer than its elements need when head_dim is odd and elements are
/// pairs.
template <class Element>
void pack_key_panel(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                    std::int64_t steps, std::int64_t stored, Element* to) {
  using Lines = EightLines<Element>;
  using V = typename Lines::V;
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(Element));
  std::int64_t s = 0;
  for (; keys == kPanel && (s + Lines::kElements) * kElement <= stored; s += Lines::kElements) {
    Lines lines;
    lines.load(from + s * kElement, row_bytes);
#pragma GCC unroll 4
    for (int j = 0; j < Lines::kVectors; ++j) {
      transpose8(lines.v[j]);
      store_eight(lines.v[j], to + (s + j * kPanel) * kPanel);
    }
  }
  for (; s < steps; s += kPanel) {
    const std::int64_t begin = s * kElement;
    V square[kPanel];
#pragma GCC unroll 8
    for (int i = 0; i < kPanel; ++i) {
      square[i] = i < keys ? load_eight<V>(from + i * row_bytes + begin, stored - begin) : V{};
    }
    transpose8(square);
    for (std::int64_t i = 0; i < kPanel && s + i < steps; ++i) {
      std::memcpy(to + (s + i) * kPanel, &square[i], sizeof(V));
    }
  }
}

/// `keys` <= 8 rows of v into their places in all panels of one head.
template <class Element>
void pack_value_rows(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                     std::int64_t value_dim, std::int64_t panel_stride, Element* to) {
  using Lines = EightLines<Element>;
  using V = typename Lines::V;
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(Element));
  std::int64_t d = 0;
  for (; keys == kPanel && d + Lines::kElements <= value_dim; d += Lines::kElements) {
    Lines lines;
    lines.load(from + d * kElement, row_bytes);
#pragma GCC unroll 4
    for (int j = 0; j < Lines::kVectors; ++j) {
      store_eight(lines.v[j], to);
      to += panel_stride;
    }
  }
  for (; d < value_dim; d += kPanel) {
    for (std::int64_t key = 0; key < keys; ++key) {
      const auto v =
          load_eight<V>(from + key * row_bytes + d * kElement, (value_dim - d) * kElement);
      std::memcpy(to + key * kPanel, &v, sizeof(v));
    }
    to += panel_stride;
  }
}

/// The same for pairs: rows of two keys, element by element side by side.
void pack_value_pairs(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                      std::int64_t value_dim, std::int64_t panel_stride, std::uint16_t* to) {
  using Lines = EightLines<std::uint16_t>;
  using V = Lines::V;
  const auto interleave = [](const V& a, const V& b, std::uint16_t* place) {
    const V low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    const V high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(place, &low, sizeof(low));
    std::memcpy(place + kPanel, &high, sizeof(high));
  };
  std::int64_t d = 0;
  for (; keys == kPanel && d + Lines::kElements <= value_dim; d += Lines::kElements) {
    Lines lines;
    lines.load(from + d * 2, row_bytes);
#pragma GCC unroll 4
    for (int j = 0; j < Lines::kVectors; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kPanel; i += 2) {
        interleave(lines.v[j][i], lines.v[j][i + 1], to + i * kPanel);
      }
      to += panel_stride;
    }
  }
  for (; d < value_dim; d += kPanel) {
    for (std::int64_t key = 0; key < keys; key += 2) {
      const std::byte* place = from + key * row_bytes + d * 2;
      const std::int64_t bytes = (value_dim - d) * 2;
      const V a = load_eight<V>(place, bytes);
      const V b = key + 1 < keys ? load_eight<V>(place + row_bytes, bytes) : V{};
      interleave(a, b, to + key * kPanel);
    }
    to += panel_stride;
  }
}

/// The place of a key in a packed head that lies as k does.
template <class Element>
void pack_keys(const PackJob& job, const std::byte* from, std::int64_t row_bytes, std::int64_t key,
               std::int64_t head, std::int64_t dim, std::byte* packed) {
  const std::int64_t steps = steps_of(job.form.engine, dim);
  const std::int64_t keys = job.end_key - key < kPanel ? job.end_key - key : kPanel;
  auto* to = reinterpret_cast<Element*>(packed) + head * panels(job.num_keys) * steps * kPanel +
             key * steps;
  pack_key_panel<Element>(from, row_bytes, keys, steps, dim * (job.dtype == DType::f32 ? 4 : 2),
                          to);
}

/// KElement and VElement: what an element of a packed panel of k is, and a scalar of v.
template <class KElement, class VElement, bool IsPair>
void pack_all(const PackJob& job) {
  const std::int64_t v_stride =
      value_rows(job.form.engine, job.num_keys) * kPanel * (IsPair ? 2 : 1);
  // Heads inside: the caller's rows hold all heads side by side, so memory is read from end to end.
  // One tensor after the other: 8 streams at a time, which the processor follows.
  for (std::int64_t key = job.first_key; key < job.end_key; key += kPanel) {
    const std::int64_t keys = job.end_key - key < kPanel ? job.end_key - key : kPanel;
    for (std::int64_t head = 0; head < job.num_heads; ++head) {
      const std::byte* k = job.k + key * job.k_row_bytes + head * job.k_head_bytes;
      pack_keys<KElement>(job, k, job.k_row_bytes, key, head, job.head_dim, job.packed_k);
    }
    for (std::int64_t head = 0; head < job.num_heads; ++head) {
      const std::byte* from = job.v + key * job.v_row_bytes + head * job.v_head_bytes;
      if (IsPair && job.form.values == ValueForm::keys) {
        pack_keys<KElement>(job, from, job.v_row_bytes, key, head, job.value_dim, job.packed_v);
        continue;
      }
      auto* v = reinterpret_cast<VElement*>(job.packed_v) +
                head * panels(job.value_dim) * v_stride + key * kPanel;
      if constexpr (IsPair) {
        pack_value_pairs(from, job.v_row_bytes, keys, job.value_dim, v_stride, v);
      } else {
        pack_value_rows<VElement>(from, job.v_row_bytes, keys, job.value_dim, v_stride, v);
      }
    }
  }
}

void pack(const PackJob& job) {
  if (job.form.engine == Engine::bf16_pair) {
    pack_all<float, std::uint16_t, true>(job);
  } else if (job.dtype == DType::f32) {
    pack_all<float, float, false>(job);
  } else {
    pack_all<std::uint16_t, std::uint16_t, false>(job);
  }
}

/// Pairs of channels of keys a and b to pairs of keys: one per channel.
void pair_keys(const float* k, std::int64_t num_keys, std::int64_t head_dim, float* k_by_channels) {
  const std::int64_t steps = steps_of(Engine::bf16_pair, head_dim);
  const std::int64_t rows = value_rows(Engine::bf16_pair, num_keys);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* panel = k + 2 * row / kPanel * kPanel * steps + 2 * row % kPanel;
    for (std::int64_t d = 0; d < panels(head_dim) * kPanel; d += 2) {
      const bool is_inside = d < head_dim;
      const float* pair = panel + d / 2 * kPanel;
      const std::uint32_t a = is_inside ? std::bit_cast<std::uint32_t>(pair[0]) : 0u;
      const std::uint32_t b = is_inside ? std::bit_cast<std::uint32_t>(pair[1]) : 0u;
      float* to = k_by_channels + (d / kPanel * rows + row) * kPanel + d % kPanel;
      to[0] = std::bit_cast<float>((a & 0xffffu) | (b << 16));
      to[1] = std::bit_cast<float>((a >> 16) | (b & 0xffff0000u));
    }
  }
}
