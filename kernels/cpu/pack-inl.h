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

/// One panel of `keys` <= 8 rows of `steps` elements: to[step][key], missing keys 0. A row holds
/// `stored` bytes, which is fewer than its elements need when head_dim is odd and elements are
/// pairs.
template <class Element>
void pack_key_panel(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                    std::int64_t steps, std::int64_t stored, Element* to) {
  using V = typename Eight<Element>::V;
  for (std::int64_t s = 0; s < steps; s += 8) {
    const std::int64_t begin = s * static_cast<std::int64_t>(sizeof(Element));
    const std::int64_t left = stored - begin;
    const std::int64_t bytes =
        left < static_cast<std::int64_t>(sizeof(V)) ? left : static_cast<std::int64_t>(sizeof(V));
    V square[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      square[i] = V{};
      if (i < keys && bytes == sizeof(V)) {
        std::memcpy(&square[i], from + i * row_bytes + begin, sizeof(V));
      } else if (i < keys) {
        std::memcpy(&square[i], from + i * row_bytes + begin, static_cast<std::size_t>(bytes));
      }
    }
    transpose8_stage<V, 1>(square);
    transpose8_stage<V, 2>(square);
    transpose8_stage<V, 4>(square);
    for (std::int64_t i = 0; i < 8 && s + i < steps; ++i) {
      std::memcpy(to + (s + i) * kPanel, &square[i], sizeof(V));
    }
  }
}

/// `channels` <= 8 elements of a row, zeros behind them.
template <class Element>
CP_INLINE typename Eight<Element>::V load_eight(const std::byte* from, std::int64_t channels) {
  typename Eight<Element>::V v{};
  if (channels >= kPanel) {
    std::memcpy(&v, from, sizeof(v));
  } else {
    std::memcpy(&v, from, static_cast<std::size_t>(channels) * sizeof(Element));
  }
  return v;
}

/// `keys` <= 8 rows of v into their places in all panels of one head.
template <class Element>
void pack_value_rows(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                     std::int64_t value_dim, std::int64_t panel_stride, Element* to) {
  for (std::int64_t d = 0; d < value_dim; d += kPanel) {
    for (std::int64_t key = 0; key < keys; ++key) {
      const std::byte* place =
          from + key * row_bytes + d * static_cast<std::int64_t>(sizeof(Element));
      const auto v = load_eight<Element>(place, value_dim - d);
      std::memcpy(to + key * kPanel, &v, sizeof(v));
    }
    to += panel_stride;
  }
}

/// The same for pairs: rows of two keys, element by element side by side.
void pack_value_pairs(const std::byte* from, std::int64_t row_bytes, std::int64_t keys,
                      std::int64_t value_dim, std::int64_t panel_stride, std::uint16_t* to) {
  using V = Eight<std::uint16_t>::V;
  for (std::int64_t d = 0; d < value_dim; d += kPanel) {
    for (std::int64_t key = 0; key < keys; key += 2) {
      const std::byte* place = from + key * row_bytes + d * 2;
      const V a = load_eight<std::uint16_t>(place, value_dim - d);
      const V b =
          key + 1 < keys ? load_eight<std::uint16_t>(place + row_bytes, value_dim - d) : V{};
      const V low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      const V high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      std::memcpy(to + key * kPanel, &low, sizeof(low));
      std::memcpy(to + (key + 1) * kPanel, &high, sizeof(high));
    }
    to += panel_stride;
  }
}

/// KElement and VElement: what an element of a packed panel of k is, and a scalar of v.
template <class KElement, class VElement, bool IsPair>
void pack_all(const PackJob& job) {
  const std::int64_t steps = steps_of(job.engine, job.head_dim);
  const std::int64_t stored = job.head_dim * (job.dtype == DType::f32 ? 4 : 2);
  const std::int64_t k_head = panels(job.num_keys) * steps * kPanel;
  const std::int64_t v_stride = value_rows(job.engine, job.num_keys) * kPanel * (IsPair ? 2 : 1);
  // Heads inside: the caller's rows hold all heads side by side, so memory is read from end to end.
  for (std::int64_t key = job.first_key; key < job.end_key; key += kPanel) {
    const std::int64_t keys = job.end_key - key < kPanel ? job.end_key - key : kPanel;
    for (std::int64_t head = 0; head < job.num_heads; ++head) {
      auto* k = reinterpret_cast<KElement*>(job.packed_k) + head * k_head + key * steps;
      pack_key_panel<KElement>(job.k + key * job.k_row_bytes + head * job.k_head_bytes,
                               job.k_row_bytes, keys, steps, stored, k);
      auto* v = reinterpret_cast<VElement*>(job.packed_v) +
                head * panels(job.value_dim) * v_stride + key * kPanel;
      const std::byte* from = job.v + key * job.v_row_bytes + head * job.v_head_bytes;
      if constexpr (IsPair) {
        pack_value_pairs(from, job.v_row_bytes, keys, job.value_dim, v_stride, v);
      } else {
        pack_value_rows<VElement>(from, job.v_row_bytes, keys, job.value_dim, v_stride, v);
      }
    }
  }
}

void pack(const PackJob& job) {
  if (job.engine == Engine::bf16_pair) {
    pack_all<float, std::uint16_t, true>(job);
  } else if (job.dtype == DType::f32) {
    pack_all<float, float, false>(job);
  } else {
    pack_all<std::uint16_t, std::uint16_t, false>(job);
  }
}
