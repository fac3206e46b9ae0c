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

template <class Element>
void pack_keys(const PackJob& job, std::int64_t stored) {
  const std::int64_t steps = steps_of(job.engine, job.head_dim);
  auto* to = reinterpret_cast<Element*>(job.packed_k);
  for (std::int64_t key = 0; key < job.num_keys; key += kPanel) {
    const std::int64_t keys = job.num_keys - key < kPanel ? job.num_keys - key : kPanel;
    pack_key_panel<Element>(job.k + key * job.k_row_bytes, job.k_row_bytes, keys, steps, stored,
                            to);
    to += steps * kPanel;
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

template <class Element>
void pack_values(const PackJob& job) {
  auto* to = reinterpret_cast<Element*>(job.packed_v);
  for (std::int64_t d = 0; d < job.value_dim; d += kPanel) {
    const std::byte* from = job.v + d * static_cast<std::int64_t>(sizeof(Element));
    for (std::int64_t key = 0; key < job.num_keys; ++key) {
      const auto v = load_eight<Element>(from + key * job.v_row_bytes, job.value_dim - d);
      std::memcpy(to, &v, sizeof(v));
      to += kPanel;
    }
  }
}

/// Rows of two keys, element by element side by side.
void pack_value_pairs(const PackJob& job) {
  using V = Eight<std::uint16_t>::V;
  auto* to = reinterpret_cast<std::uint16_t*>(job.packed_v);
  for (std::int64_t d = 0; d < job.value_dim; d += kPanel) {
    const std::byte* from = job.v + d * 2;
    for (std::int64_t key = 0; key < job.num_keys; key += 2) {
      const V a = load_eight<std::uint16_t>(from + key * job.v_row_bytes, job.value_dim - d);
      const V b =
          key + 1 < job.num_keys
              ? load_eight<std::uint16_t>(from + (key + 1) * job.v_row_bytes, job.value_dim - d)
              : V{};
      const V low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      const V high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      std::memcpy(to, &low, sizeof(low));
      std::memcpy(to + kPanel, &high, sizeof(high));
      to += 2 * kPanel;
    }
  }
}

void pack(const PackJob& job) {
  if (job.engine == Engine::bf16_pair) {
    pack_keys<float>(job, job.head_dim * 2);
    pack_value_pairs(job);
  } else if (job.dtype == DType::f32) {
    pack_keys<float>(job, job.head_dim * 4);
    pack_values<float>(job);
  } else {
    pack_keys<std::uint16_t>(job, job.head_dim * 2);
    pack_values<std::uint16_t>(job);
  }
}
