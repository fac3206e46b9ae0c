#include "launch/faults.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "launch/faults_comm.h"

namespace cpattn {
namespace {

/// The last rank that owns query rows; -1 when there is none.
int last_rank_with_rows(const Plan& plan) {
  const auto& shards = plan.sharding().shards;
  for (std::size_t i = shards.size(); i-- > 0;) {
    if (shards[i].q_rows > 0) return static_cast<int>(i);
  }
  return -1;
}

/// The last rank that owns keys; -1 when there is none.
int last_rank_with_keys(const Plan& plan) {
  const auto& shards = plan.sharding().shards;
  for (std::size_t i = shards.size(); i-- > 0;) {
    if (shards[i].kv_rows > 0) return static_cast<int>(i);
  }
  return -1;
}

bool reads_keys(const StateOp& op) {
  return op.kind == StateOpKind::block || op.kind == StateOpKind::accumulate;
}

/// The first step after the local one in which this rank works on keys; -1 when there is none.
std::int64_t first_working_hop(const Schedule& schedule) {
  for (std::size_t step = 1; step < schedule.steps.size(); ++step) {
    for (const ChunkProgram& program : schedule.steps[step].programs) {
      for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
        if (reads_keys(schedule.ops[static_cast<std::size_t>(i)])) {
          return static_cast<std::int64_t>(step);
        }
      }
    }
  }
  return -1;
}

/// Calls change(op) for every op of a step.
template <class Change>
void for_each_op(Schedule& schedule, std::size_t step, Change&& change) {
  for (const ChunkProgram& program : schedule.steps[step].programs) {
    for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
      change(schedule.ops[static_cast<std::size_t>(i)]);
    }
  }
}

std::int64_t shift_diagonal(Schedule& schedule) {
  std::int64_t sites = 0;
  for (StateOp& op : schedule.ops) {
    if (!reads_keys(op) || op.mask.kind != MaskKind::causal) continue;
    --op.mask.first_row_limit;  // a query no longer sees the last key it may see
    ++sites;
  }
  return sites;
}

/// The keys that a step works on are seen by nobody.
std::int64_t blind_hop(Schedule& schedule, std::size_t step) {
  std::int64_t sites = 0;
  for_each_op(schedule, step, [&](StateOp& op) {
    if (!reads_keys(op)) return;
    op.mask = {MaskKind::causal, std::numeric_limits<std::int32_t>::min()};
    ++sites;
  });
  return sites;
}

std::int64_t drop_hop(Schedule& schedule) {
  const std::int64_t step = first_working_hop(schedule);
  return step < 0 ? 0 : blind_hop(schedule, static_cast<std::size_t>(step));
}

/// What a repeated op adds: a state merged with itself counts its keys twice.
StateOp repeated(const StateOp& op) {
  if (op.kind == StateOpKind::accumulate) return op;
  StateOp merge = op;
  merge.kind = StateOpKind::merge;
  merge.left = op.dst;
  merge.right = op.dst;
  return merge;
}

std::int64_t merge_hop_twice(Schedule& schedule) {
  const std::int64_t target = first_working_hop(schedule);
  if (target < 0) return 0;
  std::vector<StateOp> ops;
  std::int64_t sites = 0;
  for (std::size_t step = 0; step < schedule.steps.size(); ++step) {
    for (ChunkProgram& program : schedule.steps[step].programs) {
      const auto begin = static_cast<std::int64_t>(ops.size());
      for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
        const StateOp& op = schedule.ops[static_cast<std::size_t>(i)];
        ops.push_back(op);
        if (static_cast<std::int64_t>(step) != target || !reads_keys(op)) continue;
        ops.push_back(repeated(op));
        ++sites;
      }
      program.op_begin = begin;
      program.op_end = static_cast<std::int64_t>(ops.size());
    }
  }
  schedule.ops = std::move(ops);
  return sites;
}

/// Keys of the second half of an owner's chunks are taken from its first half.
std::int64_t swap_half(Schedule& schedule, const Sharding& sharding) {
  std::int64_t sites = 0;
  for (std::size_t step = 1; step < schedule.steps.size(); ++step) {
    const auto owner = static_cast<std::size_t>(schedule.steps[step].kv_owner);
    const auto half = static_cast<std::int32_t>(sharding.shards[owner].kv.size() / 2);
    for_each_op(schedule, step, [&](StateOp& op) {
      if (!reads_keys(op) || half == 0 || op.kv_block < half) return;
      op.kv_block -= half;
      ++sites;
    });
  }
  return sites;
}

/// Moves the border between two neighbouring documents by one token, or cuts the last token off.
std::int64_t shift_border(SequenceBatch& batch) {
  std::vector<Document>& documents = batch.documents;
  for (std::size_t i = 0; i + 1 < documents.size(); ++i) {
    Document& left = documents[i];
    Document& right = documents[i + 1];
    if (right.q_tokens == 0 || right.kv_tokens == 0) continue;
    if (left.q_begin + left.q_tokens != right.q_begin) continue;
    if (left.kv_begin + left.kv_tokens != right.kv_begin) continue;
    ++left.q_tokens, ++left.kv_tokens;
    ++right.q_begin, ++right.kv_begin;
    --right.q_tokens, --right.kv_tokens;
    return 1;
  }
  for (std::size_t i = documents.size(); i-- > 0;) {
    if (documents[i].q_tokens == 0 || documents[i].kv_tokens == 0) continue;
    --documents[i].q_tokens;
    --documents[i].kv_tokens;
    return 1;
  }
  return 0;
}

std::int64_t flip_lowest_bit(const AnyTensor& tensor) {
  std::byte* element = tensor.row(tensor.shape[0] - 1, 0);
  const std::size_t lowest =
      std::endian::native == std::endian::little ? 0 : size_of(tensor.dtype) - 1;
  element[lowest] ^= std::byte{1};
  return 1;
}

std::int64_t spoil_first_row(const AnyTensor& tensor) {
  for (std::int64_t head = 0; head < tensor.shape[1]; ++head) {
    for (std::int64_t channel = 0; channel < tensor.shape[2]; ++channel) {
      store_from_float(tensor.row(0, head), tensor.dtype, channel,
                       std::numeric_limits<float>::quiet_NaN());
    }
  }
  return 1;
}

std::int64_t convert_to_base2(const ResultTensor& lse) {
  const std::int64_t elements = lse.shape[0] * lse.shape[1];
  for (std::int64_t i = 0; i < elements; ++i) {
    lse.memory.as<float>()[i] *= static_cast<float>(1.4426950408889634);  // log2(e)
  }
  return elements;
}

/// Head h gets what head h + shift had.
std::int64_t rotate_heads(const AnyTensor& tensor, std::int64_t shift) {
  const std::int64_t heads = tensor.shape[1];
  if (heads <= shift) return 0;
  const std::size_t head_bytes = static_cast<std::size_t>(tensor.shape[2]) * size_of(tensor.dtype);
  std::vector<std::byte> row(static_cast<std::size_t>(heads) * head_bytes);
  for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (std::int64_t head = 0; head < heads; ++head) {
      std::memcpy(&row[static_cast<std::size_t>(head) * head_bytes],
                  tensor.row(i, (head + shift) % heads), head_bytes);
    }
    for (std::int64_t head = 0; head < heads; ++head) {
      std::memcpy(tensor.row(i, head), &row[static_cast<std::size_t>(head) * head_bytes],
                  head_bytes);
    }
  }
  return tensor.shape[0];
}

/// Whether it adds what came from another rank to a sum that goes on.
bool adds_piece(const FoldOp& op) {
  return op.kind == DkvOpKind::sum && (is_scratch(op.left) || is_scratch(op.right));
}

/// One side of the first sum that has a piece is left out.
std::int64_t drop_piece(GradientSchedule& schedule) {
  const auto op = std::find_if(schedule.folds.begin(), schedule.folds.end(), adds_piece);
  if (op == schedule.folds.end()) return 0;
  op->kind = DkvOpKind::copy;
  if (is_scratch(op->left)) op->left = op->right;
  return 1;
}

/// The piece of the first sum that has one is added to its result again.
std::int64_t add_piece_twice(GradientSchedule& schedule) {
  std::vector<FoldOp>& folds = schedule.folds;
  const auto op = std::find_if(folds.begin(), folds.end(), adds_piece);
  if (op == folds.end()) return 0;
  FoldOp again = *op;
  again.left = op->dst;
  again.right = is_scratch(op->left) ? op->left : op->right;
  const std::int64_t place = op - folds.begin() + 1;
  folds.insert(folds.begin() + place, again);
  for (GradientStep& step : schedule.steps) {
    if (step.fold_begin >= place) ++step.fold_begin;
    if (step.fold_end >= place) ++step.fold_end;
  }
  return 1;
}

std::int64_t zero_rows(const AnyTensor& tensor, const OwnedChunk& chunk) {
  const std::size_t head_bytes = static_cast<std::size_t>(tensor.shape[2]) * size_of(tensor.dtype);
  for (std::int64_t i = 0; i < chunk.num_tokens; ++i) {
    for (std::int64_t head = 0; head < tensor.shape[1]; ++head) {
      std::memset(tensor.row(chunk.local_begin + i, head), 0, head_bytes);
    }
  }
  return chunk.num_tokens;
}

}  // namespace

void Fault::plant(Problem& problem) {
  if (is(FaultKind::scale_doubled)) {
    problem.shape.softmax_scale *= 2.0;
    ++sites_;
  }
  if (is(FaultKind::cu_seqlens_off_by_one)) sites_ += shift_border(problem.batch);
}

void Fault::plant(Plan& plan) {
  Schedule& schedule = plan.mutable_schedule();
  if (is(FaultKind::causal_off_by_one)) sites_ += shift_diagonal(schedule);
  if (is(FaultKind::hop_dropped)) sites_ += drop_hop(schedule);
  if (is(FaultKind::hop_merged_twice)) sites_ += merge_hop_twice(schedule);
  if (is(FaultKind::zigzag_wrong_half)) sites_ += swap_half(schedule, plan.sharding());
}

void Fault::plant_in_kv(const AnyTensor& tensor) {
  if (is(FaultKind::kv_head_map_wrong)) sites_ += rotate_heads(tensor, 1);
}

void Fault::plant(GradientPlan& plan) {
  if (is(FaultKind::dkv_piece_dropped)) sites_ += drop_piece(plan.mutable_schedule());
  if (is(FaultKind::dkv_piece_added_twice)) sites_ += add_piece_twice(plan.mutable_schedule());
}

void Fault::blind_all_hops(Plan& plan) {
  Schedule& schedule = plan.mutable_schedule();
  for (std::size_t step = 1; step < schedule.steps.size(); ++step) {
    sites_ += blind_hop(schedule, step);
  }
}

void Fault::plant_in_results(const Plan& plan, std::span<const ResultTensor> results) {
  for (const ResultTensor& tensor : results) {
    if (tensor.role == ResultRole::lse && is(FaultKind::lse_base2)) {
      sites_ += convert_to_base2(tensor);
    }
    if (tensor.role == ResultRole::dq && is(FaultKind::dq_head_group_wrong)) {
      sites_ += rotate_heads(tensor.view(), plan.problem().shape.group_size());
    }
    if (tensor.role == ResultRole::out && plan.rank() == last_rank_with_rows(plan)) {
      if (is(FaultKind::bit_flip)) sites_ += flip_lowest_bit(tensor.view());
      if (is(FaultKind::nan_row)) sites_ += spoil_first_row(tensor.view());
    }
    if (tensor.role == ResultRole::dk && is(FaultKind::dk_chunk_zeroed) &&
        plan.rank() == last_rank_with_keys(plan)) {
      sites_ += zero_rows(tensor.view(), plan.shard().kv.front());
    }
  }
}

Communicator& Fault::plant(Communicator& comm) {
  if (is(FaultKind::gradients_rounded_per_hop)) {
    replaced_ = make_rounding(comm, sites_);
    return *replaced_;
  }
  const bool leaves = is(FaultKind::rank_returns_early) || is(FaultKind::rank_never_answers);
  if (!leaves || comm.size() < 2 || comm.rank() != comm.size() - 1) return comm;
  replaced_ = make_leaving(comm, is(FaultKind::rank_returns_early));
  return *replaced_;
}

}  // namespace cpattn
