// Conversion to compute form, and the register-only loop that measures the peak of this instruction
// set.

/// `count` elements of f16 or bf16 to f32.
void widen(const std::byte* from, DType dtype, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const std::byte* place = from + 2 * i;
    store_unaligned(to + i, dtype == DType::f16 ? widen_f16(place) : widen_bf16(place));
  }
  alignas(64) std::byte rest[2 * kLanes] = {};
  alignas(64) float wide[kLanes];
  if (i == count) return;
  std::memcpy(rest, from + 2 * i, static_cast<std::size_t>(count - i) * 2);
  store_unaligned(wide, dtype == DType::f16 ? widen_f16(rest) : widen_bf16(rest));
  std::memcpy(to + i, wide, static_cast<std::size_t>(count - i) * 4);
}

/// 12 independent accumulators (the 16 registers of AVX2 hold no more; they cover latency times two
/// ports of every instruction set here). Returns the flops done.
template <Engine E>
double burn_rounds(std::int64_t rounds) {
  constexpr int kAccumulators = CP_REGISTER_ROWS * kGroupVectors;
  F sum[kAccumulators];
  // Unlike starting values that the compiler cannot see: equal chains would be computed once.
#pragma GCC unroll 24
  for (int i = 0; i < kAccumulators; ++i) {
    sum[i] = broadcast(static_cast<float>(i));
    asm volatile("" : "+" CP_VECTOR_REGISTER(sum[i]));
  }
  F a = broadcast(0x1.0p-40f), b = broadcast(0x1.8p-40f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+" CP_VECTOR_REGISTER(a), "+" CP_VECTOR_REGISTER(b));
#pragma GCC unroll 24
    for (int i = 0; i < kAccumulators; ++i) sum[i] = mac<E>(a, b, sum[i]);
  }
  for (int i = 0; i < kAccumulators; ++i) {
    asm volatile("" : "+" CP_VECTOR_REGISTER(sum[i]));  // keep every chain
  }
  const double flop_per_lane = E == Engine::f32 ? 2.0 : 4.0;
  return static_cast<double>(rounds) * kAccumulators * kLanes * flop_per_lane;
}

double burn(Engine engine, std::int64_t rounds) {
#if defined(__AVX512BF16__)
  if (engine == Engine::bf16_pair) return burn_rounds<Engine::bf16_pair>(rounds);
#endif
  return engine == Engine::f32 ? burn_rounds<Engine::f32>(rounds) : 0.0;
}
