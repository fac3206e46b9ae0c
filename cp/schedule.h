// Schedule: for one rank, the steps of the ring and the program each q chunk runs in each step.
// Pure data.
//
// One rule makes every task: an own q chunk x an arrived kv chunk of the same document, unless no
// pair is visible. Merges follow the canonical tree (src/base/reduction_tree.h): a merge runs in
// the step in which its second child appeared.
#pragma once

#include <cstdint>
#include <vector>

#include "cp/sharding.h"
#include "kernels/block_attention.h"

namespace cpattn {

/// Ops [op_begin, op_end) of Schedule::ops, for local q chunk `q_chunk` (index into Shard::q).
struct ChunkProgram {
  std::int32_t q_chunk = 0;
  std::int64_t op_begin = 0;
  std::int64_t op_end = 0;
};

struct Step {
  int kv_owner = 0;  ///< rank whose kv shard is worked on
  int send_to = -1;  ///< peers of the hop that leaves this step; -1 at the last one
  int receive_from = -1;
  std::vector<ChunkProgram> programs;  ///< q chunks with something to do
};

/// StateOp::kv_block is the index into the owner's Shard::kv.
struct Schedule {
  std::vector<Step> steps;
  std::vector<StateOp> ops;
  int num_carried_slots = 0;  ///< states that live from one step to a later one, at most at a time
  int num_scratch_slots = 0;  ///< states inside one program, at most
  int direction = 1;          ///< +1: spans travel to rank + 1
};

/// The ring's direction: the one in which kv chunks get where they are seen on the shorter way;
/// shuffled, the other one. +1: under a causal mask a contiguous shard is seen by the ranks after
/// its own. -1: of pairs of runs (zigzag, dual_chunk) the early one is seen by all ranks, the late
/// one by those before its own. Without a mask it makes no difference: +1.
int ring_direction(const CpConfig& config);

/// `num_steps`: as many as any rank has work in (num_ring_steps()), P at most.
Schedule make_schedule(const SequenceBatch& batch, const Sharding& sharding, const CpConfig& config,
                       int rank, int num_steps);

}  // namespace cpattn
