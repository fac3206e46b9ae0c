// KernelTable: the kernels of one backend (and instruction set) as plain function pointers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/block_attention.h"
#include "kernels/block_gradient.h"
#include "kernels/rows.h"
#include "src/base/enum_names.h"

namespace cpattn {

/// Instruction sets the CPU kernels are compiled for. `generic` runs on anything.
enum class Isa { generic, neon, avx2, avx512, avx512_bf16 };

template <>
struct EnumNames<Isa> {
  static constexpr std::array kValues{
      NamedValue<Isa>{Isa::generic, "generic"}, NamedValue<Isa>{Isa::neon, "neon"},
      NamedValue<Isa>{Isa::avx2, "avx2"}, NamedValue<Isa>{Isa::avx512, "avx512"},
      NamedValue<Isa>{Isa::avx512_bf16, "avx512_bf16"}};
};

/// What KernelTable::burn is to do.
struct BurnArgs {
  DType dtype = DType::f32;
  std::int64_t rounds = 1;
  int num_workers = 1;  ///< thread blocks of a GPU
  Stream stream{};      ///< of a GPU
};

struct KernelTable {
  std::string_view name;   ///< "cpu/avx512", "cuda/sm80", ...
  Isa isa = Isa::generic;  ///< of a CPU's
  DeviceKind device =
      DeviceKind::cpu;  ///< where all tensors, packed forms, slots and workspaces are

  /// Of a GPU: thread blocks that work at a time, what KernelProblem::num_threads is to be; 0 on a
  /// CPU, where the caller decides.
  int num_workers = 0;

  /// Names the arithmetic: two tables with equal numerics give equal bits for this dtype. Part of
  /// what ranks agree on.
  std::string_view (*numerics)(DType dtype) = nullptr;

  /// Bytes of a packed chunk of num_keys keys, a multiple of 64.
  std::size_t (*packed_kv_bytes)(const KernelProblem& problem, std::int64_t num_keys) = nullptr;

  /// Copies the kv chunks of a shard into the contiguous per-head form that travels and is computed
  /// on.
  ///
  /// Strides  any; the last dimension contiguous.
  /// Cost     one pass over k and v.
  void (*pack_kv)(const PackKvArgs& args) = nullptr;

  /// Bytes of one carried slot (all heads and rows of one q chunk).
  std::size_t (*carried_slot_bytes)(const KernelProblem& problem) = nullptr;
  std::size_t (*workspace_bytes)(const KernelProblem& problem, const StepLimits& limits) = nullptr;

  /// Executes the programs of one step.
  ///
  /// Shapes   see ForwardArgs; Hq % Hkv == 0; D, Dv in [1, 256].
  /// Dtypes   q, k, v: f32 | f16 | bf16 (equal); out: any of them; lse f32. Accumulation f32, one
  ///          rounding at the end.
  /// Strides  any; last dimension contiguous; out and lse alias nothing.
  /// Units    lse: natural log of the sum of exp(softmax_scale * q.k).
  /// Empty    a row that sees no key: out = 0, lse = -inf.
  /// Order    keys ascending from the chunk's first, in tiles of kKeyTile: one accumulator per
  ///          element and tile, tiles added up in ascending order.
  ///          The bits of a row depend on the row, the keys it sees and the program only: not on
  ///          threads, on other rows, on packing or on strides.
  /// Errors   InvalidArgument before any work. Never communicates, allocates nothing.
  /// Cost     2 * pairs * Hq * (D + Dv) flop.
  /// Source   FlashAttention-2 (Dao 2023); online softmax (Milakov, Gimelshein 2018).
  void (*forward)(const ForwardArgs& args) = nullptr;

  /// What a step's launch reads of its blocks and programs, as bytes that are copied to the device
  /// once per plan and given to every forward() of that step as `image`. Addresses of packed blocks
  /// are part of it. Null for kernels that read their arguments where they are.
  std::vector<std::byte> (*step_image)(const ForwardArgs& args) = nullptr;

  /// What the one launch of a forward() is; null on a CPU.
  LaunchTiles (*launch_tiles)(const KernelProblem& problem) = nullptr;

  /// Rows gathered or scattered by ranges.
  void (*copy_rows)(const RowCopy& copy) = nullptr;

  /// Multiply-accumulates of the kind forward() uses for this dtype and next to nothing else, for
  /// measuring the peak rate: the flops of args.rounds rounds, on a CPU done by the calling thread,
  /// on a GPU given to args.stream.
  double (*burn)(const BurnArgs& args) = nullptr;

  GradientKernels gradient;
};

/// Kernels this build and this machine can run, best last.
std::vector<const KernelTable*> available_kernels();

/// The best one, or the one asked for; Unsupported names what is missing.
const KernelTable& default_kernels();
const KernelTable& find_kernels(Isa isa);

}  // namespace cpattn
