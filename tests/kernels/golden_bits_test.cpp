// The bits of one fixed problem, written down: equal on every machine, instruction set and
// compiler.
//
// Inputs come from integers only. lse is left out: its logarithm is the C library's. A main of its
// own, so that the test can be built for another architecture with nothing but a compiler
// (docs/numerics.md).
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "kernels/kernel_table.h"
#include "src/base/digest.h"
#include "src/device/memory.h"

namespace cpattn {
namespace {

constexpr std::int64_t kRows = 300, kHeads = 2, kDim = 72, kValueDim = 40;

/// Linear congruential numbers in [-scale, scale) (Knuth's MMIX constants).
class Numbers {
 public:
  void fill(Buffer& buffer, DType dtype, std::int64_t count, float scale) {
    for (std::int64_t i = 0; i < count; ++i) {
      state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
      const float unit = static_cast<float>(static_cast<std::int32_t>(state_ >> 33)) * 0x1p-30f;
      store_from_float(buffer.data(), dtype, i, (unit - 1.0f) * scale);
    }
  }

 private:
  std::uint64_t state_ = 7;
};

AnyConstTensor view(const Buffer& buffer, DType dtype, std::int64_t heads, std::int64_t dim) {
  return contiguous_tensor(static_cast<const void*>(buffer.data()), dtype, {kRows, heads, dim});
}

/// Digest of the bits of out: causal attention of 300 rows, two heads over one kv head, one chunk.
std::uint64_t digest_of_out(const KernelTable& table, DType dtype) {
  KernelProblem problem;
  problem.shape = {kHeads, 1, kDim, kValueDim, 0.11};
  problem.dtype = dtype;
  problem.max_chunk_rows = kRows;
  Buffer q(kRows * kHeads * kDim * 4), k(kRows * kDim * 4), v(kRows * kValueDim * 4);
  Numbers numbers;
  numbers.fill(q, dtype, kRows * kHeads * kDim, 3.0f);
  numbers.fill(k, dtype, kRows * kDim, 3.0f);
  numbers.fill(v, dtype, kRows * kValueDim, 1.0f);

  const PackChunk chunk{.num_keys = kRows};
  Buffer packed(table.packed_kv_bytes(problem, kRows));
  table.pack_kv({.problem = problem,
                 .k = view(k, dtype, 1, kDim),
                 .v = view(v, dtype, 1, kValueDim),
                 .chunks = {&chunk, 1},
                 .packed = packed.data()});

  const std::array<StateOp, 2> ops{StateOp{.kind = StateOpKind::block,
                                           .dst = scratch_slot(0),
                                           .kv_block = 0,
                                           .mask = {MaskKind::causal, 1}},
                                   StateOp{.kind = StateOpKind::finalize, .left = scratch_slot(0)}};
  const QueryProgram program{0, kRows, ops};
  const KvBlock block{packed.data(), kRows};
  const StepLimits limits{kRows, 1, 1};
  Buffer out(kRows * kHeads * kValueDim * 4), lse(kRows * kHeads * 4);
  Buffer workspace(table.workspace_bytes(problem, limits));
  const std::array<std::int64_t, 3> out_shape{kRows, kHeads, kValueDim};
  table.forward({.problem = problem,
                 .q = view(q, dtype, kHeads, kDim),
                 .out = contiguous_tensor(static_cast<void*>(out.data()), DType::f32, out_shape),
                 .lse = contiguous_view(lse.as<float>(), std::array{kRows, kHeads}),
                 .kv_blocks = {&block, 1},
                 .programs = {&program, 1},
                 .workspace = workspace.data(),
                 .limits = limits,
                 .progress = {}});
  Digest digest;
  for (std::int64_t i = 0; i < kRows * kHeads * kValueDim; ++i) {
    digest.add(static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(out.as<float>()[i])));
  }
  return digest.value();
}

struct Golden {
  DType dtype;
  std::uint64_t digest;
};

/// Of the f32 engine. The bf16 dot instruction has arithmetic of its own and is not pinned here.
constexpr std::string_view kNumerics = "f32-fma/tile128/exp2-5";
constexpr std::array kGolden{Golden{DType::f32, 0x878dc1f75b3f2b31},
                             Golden{DType::f16, 0xf241003efa8853c0},
                             Golden{DType::bf16, 0x11aea4db6fe75844}};

int check_all() {
  int compared = 0, failed = 0;
  for (const KernelTable* table : available_kernels()) {
    for (const Golden& golden : kGolden) {
      if (table->numerics(golden.dtype) != kNumerics) continue;
      const std::uint64_t digest = digest_of_out(*table, golden.dtype);
      const bool is_equal = digest == golden.digest;
      std::printf("%-18s %-5s 0x%016llx %s\n", table->name.data(), name_of(golden.dtype).data(),
                  static_cast<unsigned long long>(digest), is_equal ? "ok" : "DIFFERS");
      ++compared;
      failed += is_equal ? 0 : 1;
    }
  }
  return compared >= 3 && failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace cpattn

int main() { return cpattn::check_all(); }
