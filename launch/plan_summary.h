// What `cpattn plan` says about one lane at one size, as data: text and JSON are written from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cp/plan.h"
#include "launch/plan_backward.h"
#include "launch/plan_gpu.h"
#include "launch/run_config.h"

namespace cpattn {

/// One rank's share.
struct RankSummary {
  int rank = 0;
  std::vector<OwnedChunk> q;
  std::vector<OwnedChunk> kv;
  std::int64_t q_tokens = 0;
  std::int64_t kv_tokens = 0;
  std::int64_t visible_pairs = 0;
  std::int64_t num_blocks = 0;  ///< block and accumulate ops
  std::int64_t num_merges = 0;
  std::size_t bytes_on_wire = 0;
  std::size_t packed_kv = 0;  ///< its keys and values as they travel
  MemoryPlan memory;
  std::optional<BackwardSummary> backward;  ///< none when the kernels have no backward

  std::int64_t num_tokens() const { return q_tokens > kv_tokens ? q_tokens : kv_tokens; }
  /// Peak memory over the tokens of the shard; 0 for a rank without tokens.
  double bytes_per_token() const;
  /// What the plan takes for itself, forward and backward, and that over the tokens of the shard.
  std::size_t own_memory() const;
  double own_bytes_per_token() const;
};

/// The GPU that it is for.
struct GpuSummary {
  int compute_capability = 0;
  int multiprocessors = 0;
  std::string origin;
  PlannedExchange exchange;
};

struct PlanSummary {
  std::string input;
  Problem problem;
  CpConfig config;
  int world_size = 1;
  int num_threads = 1;  ///< of a rank, on a CPU; thread blocks of a GPU
  std::string kernels;
  std::string numerics;
  std::string guarantee;
  std::string agreement_lines;
  double imbalance = 1.0;
  std::vector<LaunchTiles> launches;  ///< of a step on a GPU: forward, then backward
  std::optional<GpuSummary> gpu;      ///< whoever has found one adds it
  std::vector<RankSummary> ranks;
  std::optional<int> wanted_rank;  ///< the rank asked for; it may be beyond this size
  std::vector<Plan> detailed;      ///< plans whose steps are shown in full
  std::vector<std::vector<BackwardStepSummary>> detailed_backward;  ///< of the same plans
};

/// Plans every rank; keeps the whole plan of `rank`, or of all ranks when none is asked for and
/// they are small enough to be read.
PlanSummary summarize_plan(const Problem& problem, const CpConfig& config,
                           const KernelTable& kernels, const std::string& input, int world_size,
                           std::optional<int> rank);

/// "c4", or "d1c4" in a pack of several documents.
std::string chunk_name(const Problem& problem, const OwnedChunk& chunk);

/// "s2" for a state carried between steps, "t0" for one that lives inside a program.
std::string slot_name(SlotIndex slot);

}  // namespace cpattn
