#include "kernels/cpu/backward.h"

#include <omp.h>

#include <algorithm>

#include "kernels/check_gradient.h"
#include "kernels/cpu/compute_blocks.h"
#include "kernels/cpu/gradient_kernels.h"
#include "kernels/cpu/packed_kv.h"
#include "kernels/cpu/unit_queue.h"
#include "src/base/integers.h"

namespace cpattn::cpu {
namespace {

/// Floats of each part of one thread's memory.
struct ThreadLayout {
  std::int64_t weights, slopes, slope_rows, dq, dkv;
  std::int64_t total() const { return weights + slopes + slope_rows + dq + dkv; }
};

ThreadLayout thread_layout(const AttentionShape& shape, Engine engine,
                           const GradientLimits& limits) {
  const std::int64_t tile = kKeyTile * kQueryTile;
  return {tile + kStagger, tile + kStagger, engine == Engine::f32 ? 0 : tile / 2 + kStagger,
          dq_tile_floats(shape) + kStagger, limits.block_keys * dkv_row_floats(shape) + kStagger};
}

/// The workspace: [threads][units][blocks of the step][what is made of k and v].
struct Workspace {
  std::size_t threads, units, blocks, prepared;
  std::size_t total() const { return threads + units + blocks + prepared; }
};

Workspace workspace_of(const KernelProblem& problem, const KvForm& form,
                       const GradientLimits& limits) {
  const std::int64_t thread = thread_layout(problem.shape, form.engine, limits).total();
  const std::int64_t prepared = prepared_floats(problem, form, limits.keys, limits.kv_blocks);
  const auto whole_lines = [](std::size_t bytes) { return round_up(bytes, std::size_t{64}); };
  return {
      static_cast<std::size_t>(thread * problem.num_threads) * sizeof(float),
      whole_lines(UnitQueue::bytes(limits.q_blocks, limits.kv_blocks, problem.shape.num_kv_heads)),
      whole_lines(static_cast<std::size_t>(limits.kv_blocks) * sizeof(ComputeBlock)),
      static_cast<std::size_t>(prepared) * sizeof(float)};
}

/// One step: what all threads share.
class Step {
 public:
  Step(const BackwardArgs& args, const TileKernels& kernels)
      : args_(args),
        kernels_(kernels),
        form_(gradient_form_of(args.problem.dtype, kernels.has_bf16_dot)),
        layout_(workspace_of(args.problem, form_, args.limits)),
        blocks_(reinterpret_cast<ComputeBlock*>(args.workspace + layout_.threads + layout_.units)),
        queue_(args.tasks, static_cast<std::int64_t>(args.q_blocks.size()),
               static_cast<std::int64_t>(args.kv_blocks.size()), args.problem.shape.num_kv_heads,
               args.workspace + layout_.threads) {
    place_blocks(args.problem, form_, args.kv_blocks, blocks_,
                 reinterpret_cast<float*>(args.workspace + layout_.threads + layout_.units +
                                          layout_.blocks));
  }

  /// This thread's share of everything. Must be called by all threads of the team.
  void work() {
    const ProgressHook progress = omp_get_thread_num() == 0 ? args_.progress : ProgressHook{};
    if (must_prepare(args_.problem.dtype, form_)) {
#pragma omp for schedule(dynamic, 1)
      for (std::size_t i = 0; i < args_.kv_blocks.size(); ++i) {
        prepare_block(args_.problem, form_, kernels_, args_.kv_blocks[i], blocks_[i]);
        progress();
      }
    }
    UnitQueue::Unit unit;
    while (queue_.take(unit)) {
      queue_.await(unit, progress);
      run(unit, progress);
      queue_.finish(unit);
    }
  }

 private:
  /// A dk, dv leaf of one kv head, and how many of its keys were begun.
  struct Leaf {
    float* sums;
    std::int64_t* num_begun;
  };

  struct Scratch {
    GradientScratch tile;
    float* dq;
    float* dkv;
  };

  Scratch scratch() const {
    const ThreadLayout layout = thread_layout(args_.problem.shape, form_.engine, args_.limits);
    float* weights =
        reinterpret_cast<float*>(args_.workspace) + omp_get_thread_num() * layout.total();
    float* slopes = weights + layout.weights;
    float* slope_rows = slopes + layout.slopes;
    float* dq = slope_rows + layout.slope_rows;
    return {{weights, slopes, slope_rows}, dq, dq + layout.dq};
  }

  void run(const UnitQueue::Unit& unit, const ProgressHook& progress) const {
    const GradientTask& task = args_.tasks[static_cast<std::size_t>(unit.task)];
    const KvBlock& block = args_.kv_blocks[static_cast<std::size_t>(task.kv_block)];
    const AttentionShape& shape = args_.problem.shape;
    const Scratch memory = scratch();
    const std::int64_t dkv_floats = block.num_keys * dkv_row_floats(shape);
    const auto dkv_of = [&](SlotIndex slot) {
      return is_scratch(slot)
                 ? memory.dkv
                 : reinterpret_cast<float*>(args_.dkv_slots[static_cast<std::size_t>(slot)]) +
                       unit.kv_head * dkv_floats;
    };
    float* dkv = dkv_of(task.dkv);
    std::int64_t num_begun = task.continues_dkv ? block.num_keys : 0;
    const std::int64_t group = shape.group_size();
    const std::int64_t tiles =
        tiles_of(args_.q_blocks[static_cast<std::size_t>(task.q_chunk)].num_rows);
    for (std::int64_t head = unit.kv_head * group; head < (unit.kv_head + 1) * group; ++head) {
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        run_tile(task, head, tile, memory, {dkv, &num_begun}, progress);
      }
    }
    const std::int64_t begun_floats = num_begun * dkv_row_floats(shape);
    std::fill_n(dkv + begun_floats, dkv_floats - begun_floats, 0.0f);
    for (const SumOp& op : task.dkv_sums) {
      kernels_.gradient->add(dkv_of(op.left), dkv_of(op.right), dkv_floats, dkv_of(op.dst));
    }
  }

  void run_tile(const GradientTask& task, std::int64_t head, std::int64_t tile,
                const Scratch& memory, const Leaf& dkv, const ProgressHook& progress) const {
    const AttentionShape& shape = args_.problem.shape;
    const QueryBlock& queries = args_.q_blocks[static_cast<std::size_t>(task.q_chunk)];
    const ComputeBlock& block = blocks_[task.kv_block];
    const std::int64_t kv_head = head / shape.group_size();
    const std::int64_t first_row = tile * kQueryTile;
    const std::int64_t num_rows = std::min(queries.num_rows - first_row, kQueryTile);
    const std::int64_t dq_floats = dq_tile_floats(shape);
    const std::int64_t tiles_per_slot = tiles_of(args_.problem.max_chunk_rows);
    const auto dq_of = [&](SlotIndex slot) {
      const std::int64_t place = (slot * shape.num_heads + head) * tiles_per_slot + tile;
      return is_scratch(slot) ? memory.dq
                              : reinterpret_cast<float*>(args_.dq_slots) + place * dq_floats;
    };
    float* dq = dq_of(task.dq);
    if (!task.continues_dq) std::fill_n(dq, dq_floats, 0.0f);
    const std::int64_t packed_tile = head * tiles_of(queries.num_rows) + tile;
    kernels_.gradient->run_gradient(
        {.shape = &shape,
         .engine = form_.engine,
         .mask = task.mask,
         .first_row = first_row,
         .num_rows = num_rows,
         .queries = reinterpret_cast<const float*>(queries.packed) +
                    packed_tile * query_tile_layout(form_.engine, shape).total,
         .block = &block,
         .kv_head = kv_head,
         .dq = dq,
         .dkv = dkv.sums,
         .num_begun = dkv.num_begun,
         .progress = progress},
        memory.tile);
    for (const SumOp& op : task.dq_sums) {
      kernels_.gradient->add(dq_of(op.left), dq_of(op.right), dq_floats, dq_of(op.dst));
    }
    if (task.dq_result == kNoSlot) return;
    kernels_.gradient->finish_lanes(
        dq_of(task.dq_result),
        {.data = args_.dq.row(queries.row_begin + first_row, head),
         .row_bytes = args_.dq.strides[0] * static_cast<std::int64_t>(size_of(args_.dq.dtype)),
         .dtype = args_.dq.dtype,
         .num_rows = num_rows,
         .dim = shape.head_dim,
         .scale = static_cast<float>(shape.softmax_scale)});
  }

  const BackwardArgs& args_;
  const TileKernels& kernels_;
  KvForm form_;
  Workspace layout_;
  ComputeBlock* blocks_;
  UnitQueue queue_;
};

}  // namespace

std::size_t dq_slot_bytes(const KernelProblem& problem) {
  return static_cast<std::size_t>(problem.shape.num_heads * tiles_of(problem.max_chunk_rows) *
                                  dq_tile_floats(problem.shape)) *
         sizeof(float);
}

std::size_t gradient_workspace_bytes(const KernelProblem& problem, const TileKernels& kernels,
                                     const GradientLimits& limits) {
  return workspace_of(problem, gradient_form_of(problem.dtype, kernels.has_bf16_dot), limits)
      .total();
}

void backward(const BackwardArgs& args, const TileKernels& kernels) {
  check_backward(args);
  Step step(args, kernels);
  // A team of its own even for one thread: the caller may be a member of another team.
#pragma omp parallel num_threads(args.problem.num_threads)
  step.work();
}

}  // namespace cpattn::cpu
