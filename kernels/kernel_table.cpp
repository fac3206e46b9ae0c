#include "kernels/kernel_table.h"

#include "kernels/cpu/backward.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/dkv_sums.h"
#include "kernels/cpu/forward.h"
#include "kernels/cpu/packed_kv.h"
#include "kernels/cpu/packed_queries.h"
#include "kernels/cpu/tile_kernels.h"
#include "kernels/f32_engine.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

using GetTileKernels = const cpu::TileKernels& (*)();

/// Its backward half.
template <GetTileKernels Get>
struct CpuGradient {
  static cpu::KvForm form(DType dtype) { return cpu::gradient_form_of(dtype, Get().has_bf16_dot); }

  static std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
    const cpu::PackedSizes sizes = cpu::packed_sizes(problem, form(problem.dtype), num_keys);
    return sizes.k + sizes.v;
  }
  static void pack_kv(const PackKvArgs& args) {
    cpu::pack_kv(args, Get(), form(args.problem.dtype));
  }
  static std::size_t packed_query_bytes(const KernelProblem& problem, std::int64_t num_rows) {
    return cpu::packed_query_bytes(problem, form(problem.dtype).engine, num_rows);
  }
  static void pack_queries(const PackQueriesArgs& args) {
    cpu::pack_queries(args, Get(), form(args.problem.dtype).engine);
  }
  static std::size_t workspace_bytes(const KernelProblem& problem, const GradientLimits& limits) {
    return cpu::gradient_workspace_bytes(problem, Get(), limits);
  }
  static void backward(const BackwardArgs& args) { cpu::backward(args, Get()); }
  static void sum_dkv(const SumDkvArgs& args) { cpu::sum_dkv(args, Get()); }

  static constexpr GradientKernels kKernels{.packed_kv_bytes = packed_kv_bytes,
                                            .pack_kv = pack_kv,
                                            .packed_query_bytes = packed_query_bytes,
                                            .pack_queries = pack_queries,
                                            .dq_slot_bytes = cpu::dq_slot_bytes,
                                            .dkv_slot_bytes = cpu::dkv_slot_bytes,
                                            .workspace_bytes = workspace_bytes,
                                            .backward = backward,
                                            .sum_dkv = sum_dkv,
                                            .zero_rows = cpu::zero_rows};
};

/// The CPU backend on one instruction set, as the free functions a KernelTable holds.
template <GetTileKernels Get>
struct CpuBackend {
  static cpu::Engine engine(DType dtype) { return cpu::engine_of(dtype, Get().has_bf16_dot); }

  // Lanes are query rows and every operation is exactly rounded, so the f32 engine gives the same
  // bits on every instruction set. The bf16 dot instruction rounds differently and takes P rounded
  // to bf16.
  static std::string_view numerics(DType dtype) {
    return engine(dtype) == cpu::Engine::f32 ? kF32Numerics : "bf16-dot/tile128/exp2-4";
  }
  static std::size_t packed_kv_bytes(const KernelProblem& problem, std::int64_t num_keys) {
    const cpu::PackedSizes sizes = cpu::packed_sizes(problem, {engine(problem.dtype)}, num_keys);
    return sizes.k + sizes.v;
  }
  static void pack_kv(const PackKvArgs& args) {
    cpu::pack_kv(args, Get(), {engine(args.problem.dtype)});
  }
  static std::size_t workspace_bytes(const KernelProblem& problem, const StepLimits& limits) {
    return cpu::workspace_bytes(problem, Get(), limits);
  }
  static void forward(const ForwardArgs& args) { cpu::forward(args, Get()); }
  static double burn(const BurnArgs& args) { return Get().burn(engine(args.dtype), args.rounds); }

  static constexpr KernelTable table(std::string_view name, Isa isa) {
    return {.name = name,
            .isa = isa,
            .numerics = numerics,
            .packed_kv_bytes = packed_kv_bytes,
            .pack_kv = pack_kv,
            .carried_slot_bytes = cpu::carried_slot_bytes,
            .workspace_bytes = workspace_bytes,
            .forward = forward,
            .copy_rows = cpu::copy_rows,
            .burn = burn,
            .gradient = CpuGradient<Get>::kKernels};
  }
};

#if defined(__ARM_NEON)
constexpr KernelTable kGeneric =
    CpuBackend<cpu::generic_tile_kernels>::table("cpu/neon", Isa::neon);
#else
constexpr KernelTable kGeneric =
    CpuBackend<cpu::generic_tile_kernels>::table("cpu/generic", Isa::generic);
#endif
#if defined(__x86_64__)
constexpr KernelTable kAvx2 = CpuBackend<cpu::avx2_tile_kernels>::table("cpu/avx2", Isa::avx2);
constexpr KernelTable kAvx512 =
    CpuBackend<cpu::avx512_tile_kernels>::table("cpu/avx512", Isa::avx512);
constexpr KernelTable kAvx512Bf16 =
    CpuBackend<cpu::avx512_bf16_tile_kernels>::table("cpu/avx512_bf16", Isa::avx512_bf16);
#endif

}  // namespace

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables{&kGeneric};
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2) tables.push_back(&kAvx2);
  if (has_avx512) tables.push_back(&kAvx512);
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) {
    // 512-bit dot: 64 flop, FMA: 32. AMD issues dots as often as FMAs, which doubles the rate.
    // Intel issues two FMAs in a cycle but one dot in two cycles (measured), which halves it: there
    // the f32 engine on widened inputs is faster and more exact, so it comes last (= default).
    const bool is_faster = __builtin_cpu_is("amd");
    tables.insert(is_faster ? tables.end() : tables.end() - 1, &kAvx512Bf16);
  }
#endif
  return tables;
}

const KernelTable& default_kernels() { return *available_kernels().back(); }

const KernelTable& find_kernels(Isa isa) {
  std::string have;
  for (const KernelTable* table : available_kernels()) {
    if (table->isa == isa) return *table;
    have += have.empty() ? "" : ", ";
    have += name_of(table->isa);
  }
  throw Unsupported(detail::concat("isa ", name_of(isa), ": this machine has only ", have));
}

}  // namespace cpattn
