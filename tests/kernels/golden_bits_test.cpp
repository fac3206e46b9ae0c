// The bits of one fixed problem, written down: equal on every machine, instruction set and
// compiler.
//
// Inputs come from integers only. lse is left out: its logarithm is the C library's. A main of its
// own, so that the test can be built for another architecture with nothing but a compiler
// (docs/numerics.md).
#include <array>
#include <bit>
#include <cmath>
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

void add_bits(Digest& digest, const Buffer& buffer) {
  for (std::size_t i = 0; i < buffer.size_bytes() / 4; ++i) {
    digest.add(static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(buffer.as<float>()[i])));
  }
}

/// Causal attention of 300 rows, two heads over one kv head, one chunk.
class FixedProblem {
 public:
  FixedProblem(const KernelTable& table, DType dtype) : table_(table) {
    problem_.shape = {kHeads, 1, kDim, kValueDim, 0.11};
    problem_.dtype = dtype;
    problem_.max_chunk_rows = kRows;
    Numbers numbers;
    numbers.fill(q_, dtype, kRows * kHeads * kDim, 3.0f);
    numbers.fill(k_, dtype, kRows * kDim, 3.0f);
    numbers.fill(v_, dtype, kRows * kValueDim, 1.0f);
    numbers.fill(dout_, dtype, kRows * kHeads * kValueDim, 1.0f);
  }

  /// Digest of the bits of out.
  std::uint64_t forward() {
    Buffer packed(table_.packed_kv_bytes(problem_, kRows));
    table_.pack_kv(pack_args(packed));
    const std::array<StateOp, 2> ops{
        StateOp{.kind = StateOpKind::block, .dst = scratch_slot(0), .kv_block = 0, .mask = kMask},
        StateOp{.kind = StateOpKind::finalize, .left = scratch_slot(0)}};
    const QueryProgram program{0, kRows, ops};
    const KvBlock block{packed.data(), kRows};
    const StepLimits limits{kRows, 1, 1};
    Buffer workspace(table_.workspace_bytes(problem_, limits));
    table_.forward({.problem = problem_,
                    .q = view(q_, problem_.dtype, kHeads, kDim),
                    .out = writable(out_, kHeads, kValueDim),
                    .lse = contiguous_view(lse_.as<float>(), std::array{kRows, kHeads}),
                    .kv_blocks = {&block, 1},
                    .programs = {&program, 1},
                    .workspace = workspace.data(),
                    .limits = limits,
                    .progress = {}});
    Digest digest;
    add_bits(digest, out_);
    return digest.value();
  }

  /// Digest of the bits of dq, dk and dv. On the lse of forward() in steps of 2^-8: what another C
  /// library's logarithm would change is far below.
  std::uint64_t backward() {
    for (std::int64_t i = 0; i < kRows * kHeads; ++i) {
      lse_.as<float>()[i] = std::nearbyint(lse_.as<float>()[i] * 256.0f) / 256.0f;
    }
    const GradientKernels& kernels = table_.gradient;
    Buffer packed(kernels.packed_kv_bytes(problem_, kRows));
    kernels.pack_kv(pack_args(packed));
    Buffer queries(kernels.packed_query_bytes(problem_, kRows));
    kernels.pack_queries(
        {.problem = problem_,
         .q = view(q_, problem_.dtype, kHeads, kDim),
         .out = view(out_, DType::f32, kHeads, kValueDim),
         .dout = view(dout_, problem_.dtype, kHeads, kValueDim),
         .lse = contiguous_view<const float>(lse_.as<float>(), std::array{kRows, kHeads}),
         .dlse = {},
         .chunks = {&kAll, 1},
         .packed = queries.data()});

    const GradientTask task{.mask = kMask, .dq_sums = {}, .dkv_sums = {}, .dq_result = 0};
    const QueryBlock q_block{queries.data(), 0, kRows};
    const KvBlock kv_block{packed.data(), kRows};
    const GradientLimits limits{kRows, 1, kRows, 1};
    Buffer dq_slot(kernels.dq_slot_bytes(problem_));
    Buffer dkv_slot(kernels.dkv_slot_bytes(problem_, kRows));
    Buffer workspace(kernels.workspace_bytes(problem_, limits));
    Buffer dq(kRows * kHeads * kDim * 4), dk(kRows * kDim * 4), dv(kRows * kValueDim * 4);
    std::byte* const dkv_slots[] = {dkv_slot.data()};
    kernels.backward({.problem = problem_,
                      .q_blocks = {&q_block, 1},
                      .kv_blocks = {&kv_block, 1},
                      .tasks = {&task, 1},
                      .dq_slots = dq_slot.data(),
                      .dkv_slots = dkv_slots,
                      .dq = writable(dq, kHeads, kDim),
                      .workspace = workspace.data(),
                      .limits = limits,
                      .progress = {}});
    const DkvOp finish{.kind = DkvOpKind::finish, .left = dkv_slot.data()};
    kernels.sum_dkv({.problem = problem_,
                     .chunks = {&kAll, 1},
                     .ops = {&finish, 1},
                     .dk = writable(dk, 1, kDim),
                     .dv = writable(dv, 1, kValueDim),
                     .progress = {}});
    Digest digest;
    for (const Buffer* gradient : {&dq, &dk, &dv}) add_bits(digest, *gradient);
    return digest.value();
  }

 private:
  static constexpr BlockMask kMask{MaskKind::causal, 1};
  static constexpr PackChunk kAll{.num_keys = kRows};

  static AnyConstTensor view(const Buffer& buffer, DType dtype, std::int64_t heads,
                             std::int64_t dim) {
    return contiguous_tensor(static_cast<const void*>(buffer.data()), dtype, {kRows, heads, dim});
  }
  static AnyTensor writable(Buffer& buffer, std::int64_t heads, std::int64_t dim) {
    return contiguous_tensor(static_cast<void*>(buffer.data()), DType::f32, {kRows, heads, dim});
  }

  PackKvArgs pack_args(Buffer& packed) const {
    return {.problem = problem_,
            .k = view(k_, problem_.dtype, 1, kDim),
            .v = view(v_, problem_.dtype, 1, kValueDim),
            .chunks = {&kAll, 1},
            .packed = packed.data()};
  }

  const KernelTable& table_;
  KernelProblem problem_;
  Buffer q_{kRows * kHeads * kDim * 4}, k_{kRows * kDim * 4}, v_{kRows * kValueDim * 4};
  Buffer dout_{kRows * kHeads * kValueDim * 4}, out_{kRows * kHeads * kValueDim * 4};
  Buffer lse_{kRows * kHeads * 4};
};

struct Golden {
  DType dtype;
  std::uint64_t out;
  std::uint64_t gradients;
};

/// Of the f32 engine. The bf16 dot instruction has arithmetic of its own and is not pinned here.
constexpr std::string_view kNumerics = "f32-fma/tile128/exp2-5";
constexpr std::array kGolden{Golden{DType::f32, 0x878dc1f75b3f2b31, 0xe5f2fcc3214c6b4f},
                             Golden{DType::f16, 0xf241003efa8853c0, 0xa10530a3295ac7a7},
                             Golden{DType::bf16, 0x11aea4db6fe75844, 0x822c4fa2ce433cbb}};

bool is_golden(const KernelTable& table, DType dtype, const char* what, std::uint64_t digest,
               std::uint64_t expected) {
  const bool is_equal = digest == expected;
  std::printf("%-18s %-5s %-9s 0x%016llx %s\n", table.name.data(), name_of(dtype).data(), what,
              static_cast<unsigned long long>(digest), is_equal ? "ok" : "DIFFERS");
  return is_equal;
}

int check_all() {
  int compared = 0, failed = 0;
  for (const KernelTable* table : available_kernels()) {
    for (const Golden& golden : kGolden) {
      if (table->numerics(golden.dtype) != kNumerics) continue;
      FixedProblem problem(*table, golden.dtype);
      const std::uint64_t out = problem.forward(), gradients = problem.backward();
      failed += is_golden(*table, golden.dtype, "out", out, golden.out) ? 0 : 1;
      failed += is_golden(*table, golden.dtype, "gradients", gradients, golden.gradients) ? 0 : 1;
      ++compared;
    }
  }
  return compared >= 3 && failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace cpattn

int main() { return cpattn::check_all(); }
