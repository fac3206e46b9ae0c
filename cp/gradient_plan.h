// GradientPlan: what the backward of a Plan adds to it: who folds which leaves of dq, dk, dv in
// which step (gradient_schedule.h), where in which memory, what travels, and how much of each. Pure
// host data.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cp/gradient_schedule.h"
#include "cp/plan.h"
#include "kernels/block_gradient.h"

namespace cpattn {

/// Memory that holds f32 dk, dv of kv chunks.
enum class DkvArea {
  carried,  ///< of own chunks, from step to step
  work,     ///< inside a step
  message,  ///< leaves after the step
};

struct DkvPlace {
  DkvArea area = DkvArea::carried;
  std::size_t offset = 0;
};

/// Bytes a rank needs beyond the caller's tensors, by purpose. All linear in its shard (times log2
/// of the chunks for sums that wait).
struct GradientMemory {
  std::size_t ring_slots = 0;   ///< two kv slots
  std::size_t queries = 0;      ///< q, dout, lse, delta in packed form
  std::size_t carried_dq = 0;   ///< partial sums that wait
  std::size_t carried_dkv = 0;  ///< likewise, of own kv chunks
  std::size_t work_dkv = 0;     ///< likewise, within a step
  std::size_t messages = 0;     ///< pieces: two buffers to send, one to receive
  std::size_t workspace = 0;    ///< kernel scratch
  std::size_t images = 0;       ///< as MemoryPlan's
  std::size_t total() const {
    return ring_slots + queries + carried_dq + carried_dkv + work_dkv + messages + workspace +
           images;
  }
};

class GradientPlan {
 public:
  /// Pure, like Plan; reads `plan` only here.
  explicit GradientPlan(const Plan& plan);

  const GradientSchedule& schedule() const { return schedule_; }
  /// For negative controls only: lets a harness plant a fault in the data that the loop executes.
  GradientSchedule& mutable_schedule() { return schedule_; }

  /// As Plan's, in the form the backward computes on.
  const RingLayout& ring() const { return ring_; }
  /// Of the packed q chunks of this rank.
  const std::vector<std::size_t>& query_offsets() const { return query_offsets_; }

  /// Where the places of a step are.
  const std::vector<DkvPlace>& places(std::size_t step) const { return places_[step]; }
  /// Bytes of the messages of a step: what leaves after it, and what comes from the rank that works
  /// on our kv shard. 0 in step 0.
  std::size_t bytes_out(std::size_t step) const { return bytes_out_[step]; }
  std::size_t bytes_in(std::size_t step) const { return bytes_in_[step]; }
  std::size_t max_bytes_out() const;
  std::size_t max_bytes_in() const;

  /// f32 dk, dv of an own kv chunk.
  std::size_t dkv_bytes(std::size_t kv_chunk) const { return dkv_bytes_[kv_chunk]; }
  /// Offset of its carried slot 0; the others follow.
  std::size_t carried_offset(std::size_t kv_chunk) const { return carried_offsets_[kv_chunk]; }

  const GradientLimits& limits() const { return limits_; }
  const GradientMemory& memory() const { return memory_; }

  /// Payload bytes this rank sends in one backward: kv shards and pieces of dk, dv.
  std::size_t bytes_on_wire() const;
  /// Bytes this rank needs beyond the caller's tensors.
  std::size_t memory_bytes() const { return memory_.total(); }

  /// Plan::agreement_lines() and what the backward adds.
  const std::string& agreement_lines() const { return agreement_lines_; }

 private:
  void lay_out_inputs(const Plan& plan);
  void lay_out_sums(const Plan& plan);
  void lay_out_step(const Plan& plan, const GradientStep& step);
  void count_memory(const Plan& plan);

  GradientSchedule schedule_;
  RingLayout ring_;
  std::vector<std::size_t> query_offsets_;
  std::vector<std::vector<DkvPlace>> places_;
  std::vector<std::size_t> bytes_out_;
  std::vector<std::size_t> bytes_in_;
  std::vector<std::size_t> dkv_bytes_;
  std::vector<std::size_t> carried_offsets_;
  GradientLimits limits_;
  GradientMemory memory_;
  std::string agreement_lines_;
};

}  // namespace cpattn
