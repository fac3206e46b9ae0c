// GradientSchedule: for one rank, the tasks of every step of the backward, the pieces of dk, dv
// that leave after it, and the sums of the pieces that arrive. Pure data.
//
// A task is an own q chunk x an arrived kv chunk of which some pair is visible. Its dq leaf is
// folded along the canonical tree over the kv chunks that q chunk sees, its dk, dv leaf along the
// one over the q chunks that see that kv chunk (src/base/reduction_tree.h). dq stays on its rank,
// so its sums all happen here. Of a kv chunk's tree a rank has only the leaves of its own q chunks:
// what it can fold of them leaves a few *pieces*, the largest nodes whose present leaves are all
// its own, and these go to the chunk's owner, who folds what arrives. A sum runs as soon as both
// sides exist.
//
// Places of a kv chunk within a step. Its leaves come in ascending order, so what waits is a stack:
// a leaf either takes the next place, or is summed into the last one, which may then be summed into
// the one before. In the end piece k is in place k: places below the number of pieces are the
// message itself, and nothing is ever moved.
//
// Tasks are listed in waves of equal q + kv index. For every q chunk the kv chunks ascend and for
// every kv chunk the q chunks, and neighbours in the list touch different ones, so that threads
// find work that does not wait. shuffle_arrival permutes the kv chunks of a step.
//
// The `arrival` schedule has no trees: one running sum per q chunk, and one piece per kv chunk and
// step, added up in the order the ring brings them.
#pragma once

#include <cstdint>
#include <vector>

#include "cp/sharding.h"
#include "kernels/block_gradient.h"

namespace cpattn {

/// `task` without its spans: they are ranges of GradientSchedule::sums. Its dkv slots are places of
/// the step, its dq slots carried ones; its own scratch is scratch_slot(0) for both.
struct ScheduledTask {
  GradientTask task;
  std::int64_t dq_sum_begin = 0;
  std::int64_t dq_sum_end = 0;
  std::int64_t dkv_sum_begin = 0;
  std::int64_t dkv_sum_end = 0;
};

/// What a step does with one kv chunk: its places are [first_place, first_place + num_places) of
/// the step, of which the first num_pieces are the pieces in the end.
struct KvPlaces {
  std::int32_t first_place = 0;
  std::int32_t num_places = 0;
  std::int32_t num_pieces = 0;
};

/// A sum at the owner. Slots >= 0 are carried dk, dv slots of that chunk (numbered from 0 for
/// each); scratch_slot(k) is piece k of that chunk in the message of the step.
struct FoldOp {
  DkvOpKind kind = DkvOpKind::sum;
  std::int32_t kv_chunk = 0;  ///< index into own Shard::kv
  SlotIndex dst = 0;
  SlotIndex left = 0;
  SlotIndex right = 0;
};

/// In step 0 the kv chunks are our own: the pieces are computed where they are carried (piece k in
/// carried slot k), and none arrive. Later ones go to kv_owner.
struct GradientStep {
  int kv_owner = 0;      ///< as in Step
  int pieces_from = -1;  ///< the rank that works on our kv shard in this step; -1 in step 0
  std::int64_t task_begin = 0;
  std::int64_t task_end = 0;
  std::vector<KvPlaces> kv;  ///< by index into the owner's Shard::kv
  std::int32_t num_places = 0;
  std::vector<std::int32_t> arriving;  ///< pieces in the message from pieces_from, by own kv chunk
  std::int64_t fold_begin = 0;         ///< what to do once that message is here
  std::int64_t fold_end = 0;
};

struct GradientSchedule {
  std::vector<GradientStep> steps;
  std::vector<ScheduledTask> tasks;
  std::vector<SumOp> sums;
  std::vector<FoldOp> folds;
  int num_dq_slots = 0;                   ///< carried, any q chunk fits
  std::vector<std::int32_t> carried_dkv;  ///< carried slots of each own kv chunk
  std::vector<std::int32_t> unseeing_q;   ///< own q chunks that see no key: dq = 0
};

/// `num_steps` as make_schedule() has it.
GradientSchedule make_gradient_schedule(const SequenceBatch& batch, const Sharding& sharding,
                                        const CpConfig& config, int rank, int num_steps);

}  // namespace cpattn
