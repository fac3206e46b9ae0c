#include "kernels/cuda/check_gradient.h"

#include "kernels/check_gradient.h"
#include "kernels/cuda/check_args.h"
#include "src/base/error.h"

namespace cpattn::cuda {
namespace {

/// What cp.async and the swizzle ask of packed forms, and float4 of slots.
constexpr std::size_t kPackedAlignment = 64, kSlotAlignment = 16;

}  // namespace

void check_pack_queries(const PackQueriesArgs& args) {
  cpattn::check_pack_queries(args);
  for (const PackChunk& chunk : args.chunks)
    check_alignment(args.packed + chunk.offset, "packed", kPackedAlignment);
}

void check_backward(const BackwardArgs& args) {
  cpattn::check_backward(args);
  check_alignment(args.dq_slots, "dq_slots", kSlotAlignment);
  for (const std::byte* slot : args.dkv_slots) check_alignment(slot, "dkv_slots", kSlotAlignment);
  for (const KvBlock& block : args.kv_blocks)
    check_alignment(block.packed, "packed", kPackedAlignment);
  for (const QueryBlock& block : args.q_blocks)
    check_alignment(block.packed, "packed", kPackedAlignment);
  require(args.tasks.empty() || args.image != nullptr,
          "no image of the step: expected step_image() in device memory");
}

void check_sum_dkv(const SumDkvArgs& args) {
  cpattn::check_sum_dkv(args);
  for (const DkvOp& op : args.ops) {
    for (const std::byte* slot : {static_cast<const std::byte*>(op.dst), op.left, op.right})
      check_alignment(slot, "dkv slot", kSlotAlignment);
  }
}

}  // namespace cpattn::cuda
