#include "kernels/cpu/forward.h"

#include <omp.h>

#include <atomic>

#include "kernels/cpu/compute_blocks.h"
#include "kernels/cpu/packed_kv.h"
#include "kernels/lse.h"
#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::cpu {
namespace {

/// Floats of each part of one thread's memory.
struct ThreadLayout {
  std::int64_t q, scores, states;
  std::int64_t total() const { return q + scores + states; }
};

ThreadLayout thread_layout(const KernelProblem& problem, Engine engine, int num_scratch_slots) {
  const std::int64_t steps = steps_of(engine, problem.shape.head_dim);
  return {steps * kQueryTile + kStagger, kKeyTile * kQueryTile + kStagger,
          num_scratch_slots * state_floats(problem.shape.value_dim)};
}

/// The workspace: [threads][blocks of the step][widened k and v].
struct Workspace {
  float* threads;
  ComputeBlock* blocks;
  float* widened;
};

std::size_t thread_area_bytes(const KernelProblem& problem, Engine engine, int num_scratch_slots) {
  const ThreadLayout layout = thread_layout(problem, engine, num_scratch_slots);
  return static_cast<std::size_t>(layout.total() * problem.num_threads) * sizeof(float);
}

std::size_t block_area_bytes(const StepLimits& limits) {
  return round_up(static_cast<std::size_t>(limits.blocks + 1) * sizeof(ComputeBlock),
                  std::size_t{64});
}

Workspace carve(const ForwardArgs& args, Engine engine) {
  const std::size_t threads = thread_area_bytes(args.problem, engine, args.limits.scratch_slots);
  std::byte* blocks = args.workspace + threads;
  return {reinterpret_cast<float*>(args.workspace), reinterpret_cast<ComputeBlock*>(blocks),
          reinterpret_cast<float*>(blocks + block_area_bytes(args.limits))};
}

void check(const ForwardArgs& args) {
  const AttentionShape& shape = args.problem.shape;
  const auto fits = [&](const AnyConstTensor& tensor, std::int64_t dim, const char* name) {
    require(tensor.shape[0] == args.q.shape[0] && tensor.shape[1] == shape.num_heads &&
                tensor.shape[2] == dim && tensor.has_contiguous_rows(),
            name, " [", tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2],
            "], last stride ", tensor.strides[2], ": expected [", args.q.shape[0], ", ",
            shape.num_heads, ", ", dim, "] with a contiguous last dimension");
  };
  fits(args.q, shape.head_dim, "q");
  fits(args.out, shape.value_dim, "out");
  require(args.q.dtype == args.problem.dtype, "q is ", name_of(args.q.dtype), ", expected ",
          name_of(args.problem.dtype));
  require(args.lse.shape[0] == args.q.shape[0] && args.lse.shape[1] == shape.num_heads, "lse [",
          args.lse.shape[0], ", ", args.lse.shape[1], "]: expected [", args.q.shape[0], ", ",
          shape.num_heads, "]");
  std::int64_t keys = 0;
  for (const KvBlock& block : args.kv_blocks) keys += block.num_keys;
  require(keys <= args.limits.keys &&
              static_cast<std::int64_t>(args.kv_blocks.size()) <= args.limits.blocks,
          args.kv_blocks.size(), " kv blocks of ", keys, " keys, planned for ", args.limits.blocks,
          " of ", args.limits.keys);
}

std::int64_t head_of(const ForwardArgs& args, std::int64_t index) {
  return index / tiles_of(args.problem.max_chunk_rows) /
         static_cast<std::int64_t>(args.programs.size());
}

/// Piece of work `index`: heads outermost (neighbours share k and v), long programs first.
TileJob job_at(const ForwardArgs& args, Engine engine, const ComputeBlock* blocks,
               std::int64_t index) {
  const AttentionShape& shape = args.problem.shape;
  const std::int64_t tiles = tiles_of(args.problem.max_chunk_rows);
  const auto programs = static_cast<std::int64_t>(args.programs.size());
  const std::int64_t tile = tiles - 1 - index % tiles;
  const std::int64_t program_index = programs - 1 - index / tiles % programs;
  const std::int64_t head = head_of(args, index);
  const QueryProgram& program = args.programs[static_cast<std::size_t>(program_index)];

  TileJob job;
  job.first_row = tile * kQueryTile;
  job.num_rows =
      program.num_rows - job.first_row < kQueryTile ? program.num_rows - job.first_row : kQueryTile;
  if (job.num_rows <= 0) return job;
  const std::int64_t row = program.row_begin + job.first_row;
  const std::int64_t state = state_floats(shape.value_dim);
  job.shape = &args.problem.shape;
  job.engine = engine;
  job.ops = program.ops.data();
  job.num_ops = static_cast<std::int64_t>(program.ops.size());
  job.kv_head = head / shape.group_size();
  job.q = args.q.row(row, head);
  job.q_row_bytes = args.q.strides[0] * static_cast<std::int64_t>(size_of(args.q.dtype));
  job.dtype = args.q.dtype;
  job.blocks = blocks;
  job.carried = reinterpret_cast<float*>(args.carried) + (head * tiles + tile) * state;
  job.carried_slot = shape.num_heads * tiles * state;
  job.out = args.out.row(row, head);
  job.out_row_bytes = args.out.strides[0] * static_cast<std::int64_t>(size_of(args.out.dtype));
  job.out_dtype = args.out.dtype;
  job.lse = &args.lse(row, head);
  job.lse_row_stride = args.lse.strides[0];
  return job;
}

/// What one piece of work found, to the maximum of its head, which other threads raise too. A NaN
/// stays. Rounding keeps order, so the largest m is converted, not each.
void raise_maximum(float largest_m, float& maximum) {
  const auto logit = static_cast<float>(static_cast<double>(largest_m) * kLn2);
  const std::atomic_ref<float> shared(maximum);
  float seen = shared.load(std::memory_order_relaxed);
  while ((logit > seen || logit != logit) && seen == seen &&
         !shared.compare_exchange_weak(seen, logit, std::memory_order_relaxed)) {
  }
}

TileScratch scratch_of(const ForwardArgs& args, Engine engine, float* threads, int thread) {
  const ThreadLayout layout = thread_layout(args.problem, engine, args.limits.scratch_slots);
  float* q = threads + thread * layout.total();
  return {q, q + layout.q, q + layout.q + layout.scores};
}

/// This thread's share of everything. Must be called by all threads of the team.
void work(const ForwardArgs& args, const TileKernels& kernels, Engine engine,
          const Workspace& workspace) {
  const int thread = omp_get_thread_num();
  const TileScratch scratch = scratch_of(args, engine, workspace.threads, thread);
  if (must_widen(args.problem.dtype, engine)) {
#pragma omp for schedule(dynamic, 1)
    for (std::size_t i = 0; i < args.kv_blocks.size(); ++i) {
      prepare_block(args.problem, {engine}, kernels, args.kv_blocks[i], workspace.blocks[i]);
      if (thread == 0) args.progress();
    }
  }
  const std::int64_t num_jobs = args.problem.shape.num_heads *
                                tiles_of(args.problem.max_chunk_rows) *
                                static_cast<std::int64_t>(args.programs.size());
#pragma omp for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < num_jobs; ++i) {
    TileJob job = job_at(args, engine, workspace.blocks, i);
    if (job.num_rows <= 0) continue;
    if (thread == 0) job.progress = args.progress;
    float largest_m = kEmptyMax;
    if (args.head_maxima != nullptr) job.largest_m = &largest_m;
    kernels.run_tile(job, scratch);
    if (args.head_maxima != nullptr) {
      raise_maximum(largest_m, args.head_maxima[head_of(args, i)]);
    }
  }
}

}  // namespace

std::size_t carried_slot_bytes(const KernelProblem& problem) {
  return static_cast<std::size_t>(problem.shape.num_heads * tiles_of(problem.max_chunk_rows) *
                                  state_floats(problem.shape.value_dim)) *
         sizeof(float);
}

std::size_t workspace_bytes(const KernelProblem& problem, const TileKernels& kernels,
                            const StepLimits& limits) {
  const Engine engine = engine_of(problem.dtype, kernels.has_bf16_dot);
  return thread_area_bytes(problem, engine, limits.scratch_slots) + block_area_bytes(limits) +
         static_cast<std::size_t>(prepared_floats(problem, {engine}, limits.keys, limits.blocks)) *
             sizeof(float);
}

void forward(const ForwardArgs& args, const TileKernels& kernels) {
  check(args);
  const Engine engine = engine_of(args.problem.dtype, kernels.has_bf16_dot);
  const Workspace workspace = carve(args, engine);
  place_blocks(args.problem, {engine}, args.kv_blocks, workspace.blocks, workspace.widened);
  // A team of its own even for one thread: the caller may be a member of another team.
#pragma omp parallel num_threads(args.problem.num_threads)
  work(args, kernels, engine, workspace);
}

}  // namespace cpattn::cpu
