#include "kernels/cpu/dkv_sums.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "kernels/check_gradient.h"
#include "kernels/cpu/gradient_kernels.h"
#include "src/base/integers.h"

namespace cpattn::cpu {
namespace {

/// `count` keys from `first` on of one kv head of a chunk.
struct Piece {
  std::int64_t head;
  std::int64_t first;
  std::int64_t count;
};

FinishedRows rows_of(const AnyTensor& tensor, std::int64_t row, const Piece& piece, double scale) {
  return {.data = tensor.row(row, piece.head),
          .row_bytes = tensor.strides[0] * static_cast<std::int64_t>(size_of(tensor.dtype)),
          .dtype = tensor.dtype,
          .num_rows = piece.count,
          .dim = tensor.shape[2],
          .scale = static_cast<float>(scale)};
}

void clear(const AnyTensor& tensor, std::int64_t row, const Piece& piece) {
  const auto row_bytes = static_cast<std::size_t>(tensor.shape[2]) * size_of(tensor.dtype);
  for (std::int64_t i = 0; i < piece.count; ++i)
    std::memset(tensor.row(row + i, piece.head), 0, row_bytes);
}

void execute(const SumDkvArgs& args, const TileKernels& kernels, const DkvOp& op,
             const Piece& piece) {
  const AttentionShape& shape = args.problem.shape;
  const PackChunk& chunk = args.chunks[static_cast<std::size_t>(op.kv_chunk)];
  const std::int64_t row_floats = dkv_row_floats(shape);
  const std::int64_t offset = (piece.head * chunk.num_keys + piece.first) * row_floats;
  const std::int64_t count = piece.count * row_floats;
  const auto* left = reinterpret_cast<const float*>(op.left) + offset;
  const std::int64_t row = chunk.row_begin + piece.first;
  const FinishedRows dk = rows_of(args.dk, row, piece, shape.softmax_scale);
  const FinishedRows dv = rows_of(args.dv, row, piece, 1.0);
  switch (op.kind) {
    case DkvOpKind::sum:
      kernels.gradient->add(left, reinterpret_cast<const float*>(op.right) + offset, count,
                            reinterpret_cast<float*>(op.dst) + offset);
      break;
    case DkvOpKind::copy:
      std::memcpy(reinterpret_cast<float*>(op.dst) + offset, left,
                  static_cast<std::size_t>(count) * sizeof(float));
      break;
    case DkvOpKind::finish:
      kernels.gradient->finish_rows(left, row_floats, dk);
      kernels.gradient->finish_rows(left + padded_dim(shape.head_dim), row_floats, dv);
      break;
    case DkvOpKind::finish_empty:
      clear(args.dk, row, piece);
      clear(args.dv, row, piece);
      break;
  }
}

}  // namespace

std::size_t dkv_slot_bytes(const KernelProblem& problem, std::int64_t num_keys) {
  return static_cast<std::size_t>(problem.shape.num_kv_heads * num_keys *
                                  dkv_row_floats(problem.shape)) *
         sizeof(float);
}

void sum_dkv(const SumDkvArgs& args, const TileKernels& kernels) {
  check_sum_dkv(args);
  // Elements are independent, so a job executes all ops on its own piece of every chunk.
  constexpr std::int64_t kPieceKeys = 64;
  const std::int64_t heads = args.problem.shape.num_kv_heads;
  std::int64_t longest = 0;
  for (const PackChunk& chunk : args.chunks) longest = std::max(longest, chunk.num_keys);
  const std::int64_t num_jobs = ceil_div(longest, kPieceKeys) * heads;
#pragma omp parallel for num_threads(args.problem.num_threads) if (args.problem.num_threads > 1) \
    schedule(dynamic, 1)
  for (std::int64_t i = 0; i < num_jobs; ++i) {
    const std::int64_t first = i / heads * kPieceKeys;
    for (const DkvOp& op : args.ops) {
      const PackChunk& chunk = args.chunks[static_cast<std::size_t>(op.kv_chunk)];
      const std::int64_t count = std::min(kPieceKeys, chunk.num_keys - first);
      if (count <= 0) continue;
      execute(args, kernels, op, {i % heads, first, count});
      if (omp_get_thread_num() == 0) args.progress();
    }
  }
}

void zero_rows(const ZeroRowsArgs& args) {
  for (std::int64_t head = 0; head < args.tensor.shape[1]; ++head)
    clear(args.tensor, args.row_begin, {head, 0, args.num_rows});
}

}  // namespace cpattn::cpu
