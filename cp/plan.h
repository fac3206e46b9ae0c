// Plan: everything decided before a byte moves: sharding, one rank's schedule, sizes, guarantee,
// text, digest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cp/config.h"
#include "cp/ring_layout.h"
#include "cp/schedule.h"
#include "cp/sharding.h"
#include "kernels/kernel_table.h"
#include "kernels/shape.h"

namespace cpattn {

/// The problem as a caller states it; equal on all ranks.
struct Problem {
  AttentionShape shape;
  SequenceBatch batch;
  DType dtype = DType::f32;      ///< of q, k, v
  DType out_dtype = DType::f32;  ///< of out
};

/// Everything that keeps a Plan from being made, each naming field, value and expectation; empty
/// when nothing does. Pure.
std::vector<std::string> problems_with(const Problem& problem, const CpConfig& config, int rank,
                                       int world_size);

/// Bytes a rank needs, by purpose. All linear in its shard (times log2 of its chunks for carried
/// states).
struct MemoryPlan {
  std::size_t inputs = 0;      ///< q, k, v of the shard
  std::size_t outputs = 0;     ///< out and lse
  std::size_t ring_slots = 0;  ///< two kv slots
  std::size_t carried = 0;     ///< partial states carried between steps
  std::size_t workspace = 0;   ///< kernel scratch
  std::size_t images = 0;      ///< what launches on a device read (KernelTable::step_image)
  std::size_t maxima = 0;      ///< on a device: what head_maxima is reset from
  /// What plan() takes: all but the caller's tensors.
  std::size_t own() const { return ring_slots + carried + workspace + images + maxima; }
  std::size_t total() const { return inputs + outputs + own(); }
};

/// Plan::guarantee() of a plan whose results are the same bits for every CP size.
inline constexpr std::string_view kBitwise = "bitwise across CP sizes";

class Plan {
 public:
  /// Validates everything at once (InvalidArgument lists every problem), then decides. Pure: any
  /// process can make the plan of any rank.
  Plan(const Problem& problem, const CpConfig& config, const KernelTable& kernels, int rank,
       int world_size);

  const Problem& problem() const { return problem_; }
  const CpConfig& config() const { return config_; }
  const KernelTable& kernels() const { return *kernels_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const Sharding& sharding() const { return sharding_; }
  const Shard& shard() const { return sharding_.shards[static_cast<std::size_t>(rank_)]; }
  const Schedule& schedule() const { return schedule_; }
  /// For negative controls only: lets a harness plant a fault in the data that the loop executes.
  Schedule& mutable_schedule() { return schedule_; }

  const KernelProblem& kernel_problem() const { return kernel_problem_; }
  int num_threads() const { return num_threads_; }

  /// How far each kv chunk travels, and where it lies on the way.
  const Reach& reach() const { return reach_; }
  const RingLayout& ring() const { return ring_; }
  const StepLimits& limits() const { return limits_; }

  MemoryPlan memory() const;
  std::size_t bytes_on_wire() const { return ring_.bytes_sent(); }  ///< payload this rank sends

  /// kBitwise, or why not.
  std::string guarantee() const;

  /// "key=value" lines of all that must be equal on all ranks: knobs, shapes, lengths, kernel
  /// numerics, sharding digest.
  std::string agreement_lines() const;
  /// Of those lines: plans with equal digests do the same work on all ranks.
  std::uint64_t digest() const { return digest_; }

 private:
  Problem problem_;
  CpConfig config_;
  const KernelTable* kernels_;
  int rank_;
  int world_size_;
  int num_threads_;
  KernelProblem kernel_problem_;
  Sharding sharding_;
  Schedule schedule_;
  Reach reach_;
  RingLayout ring_;
  StepLimits limits_;
  std::uint64_t digest_ = 0;
};

}  // namespace cpattn
