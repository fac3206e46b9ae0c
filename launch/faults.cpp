#include "launch/faults.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "src/base/error.h"

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

std::int64_t drop_hop(Schedule& schedule) {
  const std::int64_t step = first_working_hop(schedule);
  if (step < 0) return 0;
  std::int64_t sites = 0;
  for_each_op(schedule, static_cast<std::size_t>(step), [&](StateOp& op) {
    if (!reads_keys(op)) return;
    op.mask = {MaskKind::causal, std::numeric_limits<std::int32_t>::min()};  // sees nothing
    ++sites;
  });
  return sites;
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

void flip_lowest_bit(const AnyTensor& tensor, std::int64_t row) {
  std::byte* element = tensor.row(row, 0);
  const std::size_t lowest =
      std::endian::native == std::endian::little ? 0 : size_of(tensor.dtype) - 1;
  element[lowest] ^= std::byte{1};
}

/// A rank that leaves, one way or the other, when the ring starts.
class LeavingCommunicator final : public Communicator {
 public:
  LeavingCommunicator(Communicator& comm, bool ends) : comm_(comm), ends_(ends) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::string_view transport() const override { return comm_.transport(); }
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    leave_at(tag);
    return comm_.isend(bytes, peer, tag);
  }
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    leave_at(tag);
    return comm_.irecv(bytes, peer, tag);
  }
  bool test(Pending& pending) override { return comm_.test(pending); }
  void abort(int exit_code, std::string_view reason) noexcept override {
    comm_.abort(exit_code, reason);
  }

 private:
  void leave_at(Tag tag) const {
    if (tag != Tag::ring_header && tag != Tag::ring_payload) return;
    if (ends_) ::_exit(0);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }

  Communicator& comm_;
  bool ends_;
};

std::string_view need_of_ring(const InputInfo& input, std::int64_t cp) {
  if (cp < 2) return "needs a cp size of 2 or more";
  std::int64_t keys = 0;
  for (const Document& document : input.batch.documents) keys += document.kv_tokens;
  return keys > 0 ? "" : "needs keys";
}

}  // namespace

std::string_view description_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::scale_doubled:
      return "the softmax scale is off by a factor of 2";
    case FaultKind::causal_off_by_one:
      return "the causal mask is off by one: a query does not see the last key it may see";
    case FaultKind::hop_dropped:
      return "the keys that arrive with one hop are not used";
    case FaultKind::hop_merged_twice:
      return "the keys that arrive with one hop are counted twice";
    case FaultKind::lse_base2:
      return "lse is a base-2 logarithm";
    case FaultKind::zigzag_wrong_half:
      return "the first half of a zigzag shard is read in place of the second";
    case FaultKind::kv_head_map_wrong:
      return "query heads read the neighbouring kv head";
    case FaultKind::bit_flip:
      return "the lowest bit of one output element is flipped";
    case FaultKind::nan_row:
      return "one row of out is NaN";
    case FaultKind::cu_seqlens_off_by_one:
      return "a document border is off by one token";
    case FaultKind::rank_returns_early:
      return "the last rank ends before the exchange, with exit code 0";
    case FaultKind::rank_never_answers:
      return "the last rank stops answering before the exchange";
  }
  return "?";
}

std::optional<FaultKind> fault_from_option(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const std::optional<FaultKind> kind = from_name<FaultKind>(name);
  require(kind.has_value(), "inject: '", name, "' is no fault, expected ", choices<FaultKind>());
  return kind;
}

std::string_view what_fault_needs(FaultKind kind, const LaneConfig& lane, std::int64_t cp,
                                  const InputInfo& input) {
  switch (kind) {
    case FaultKind::scale_doubled:
    case FaultKind::lse_base2:
    case FaultKind::bit_flip:
    case FaultKind::nan_row:
      return input.batch.q_rows > 0 ? "" : "needs query rows";
    case FaultKind::causal_off_by_one:
      return lane.mask == MaskKind::causal ? "" : "needs a causal mask";
    case FaultKind::hop_dropped:
    case FaultKind::hop_merged_twice:
      return need_of_ring(input, cp);
    case FaultKind::zigzag_wrong_half:
      if (lane.sharding != ShardingKind::zigzag) return "needs zigzag sharding";
      return need_of_ring(input, cp);
    case FaultKind::kv_head_map_wrong:
      return input.shape.num_kv_heads > 1 ? "" : "needs two kv heads or more";
    case FaultKind::cu_seqlens_off_by_one: {
      SequenceBatch batch = input.batch;
      return shift_border(batch) > 0 ? "" : "needs a document with queries and keys";
    }
    case FaultKind::rank_returns_early:
    case FaultKind::rank_never_answers:
      return cp >= 2 ? "" : "needs a cp size of 2 or more";
  }
  return "?";
}

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
  const std::int64_t heads = tensor.shape[1];
  if (!is(FaultKind::kv_head_map_wrong) || heads < 2) return;
  const std::size_t head_bytes = static_cast<std::size_t>(tensor.shape[2]) * size_of(tensor.dtype);
  std::vector<std::byte> first(head_bytes);
  for (std::int64_t row = 0; row < tensor.shape[0]; ++row) {
    std::memcpy(first.data(), tensor.row(row, 0), head_bytes);
    for (std::int64_t head = 0; head + 1 < heads; ++head) {
      std::memcpy(tensor.row(row, head), tensor.row(row, head + 1), head_bytes);
    }
    std::memcpy(tensor.row(row, heads - 1), first.data(), head_bytes);
    ++sites_;
  }
}

void Fault::plant_in_results(const Plan& plan, const AnyTensor& out,
                             const TensorView<float, 2>& lse) {
  if (is(FaultKind::lse_base2)) {
    for (std::int64_t row = 0; row < lse.shape[0]; ++row) {
      for (std::int64_t head = 0; head < lse.shape[1]; ++head) {
        lse(row, head) *= static_cast<float>(1.4426950408889634);  // log2(e)
        ++sites_;
      }
    }
  }
  if (plan.rank() != last_rank_with_rows(plan)) return;
  if (is(FaultKind::bit_flip)) {
    flip_lowest_bit(out, out.shape[0] - 1);
    ++sites_;
  }
  if (is(FaultKind::nan_row)) {
    for (std::int64_t head = 0; head < out.shape[1]; ++head) {
      for (std::int64_t channel = 0; channel < out.shape[2]; ++channel) {
        store_from_float(out.row(0, head), out.dtype, channel,
                         std::numeric_limits<float>::quiet_NaN());
      }
    }
    ++sites_;
  }
}

Communicator& Fault::plant(Communicator& comm) {
  const bool leaves = is(FaultKind::rank_returns_early) || is(FaultKind::rank_never_answers);
  if (!leaves || comm.size() < 2 || comm.rank() != comm.size() - 1) return comm;
  leaving_ = std::make_unique<LeavingCommunicator>(comm, is(FaultKind::rank_returns_early));
  return *leaving_;
}

}  // namespace cpattn
