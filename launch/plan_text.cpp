#include "launch/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

namespace cpattn {
namespace {

/// Runs of tokens shown before the rest is only counted.
constexpr std::size_t kMaxRuns = 8;

std::string bytes_text(double bytes) {
  constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024.0 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024.0;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, kUnits[unit]);
}
std::string bytes_text(std::size_t bytes) { return bytes_text(static_cast<double>(bytes)); }

/// "0-15, 48-63": neighbouring chunks of a document joined.
std::string token_runs(const Problem& problem, const std::vector<OwnedChunk>& chunks) {
  struct Run {
    std::int32_t document;
    std::int64_t begin;
    std::int64_t end;
  };
  std::vector<Run> runs;
  for (const OwnedChunk& chunk : chunks) {
    const std::int64_t end = chunk.first + chunk.num_tokens;
    if (!runs.empty() && runs.back().document == chunk.document && runs.back().end == chunk.first) {
      runs.back().end = end;
    } else {
      runs.push_back({chunk.document, chunk.first, end});
    }
  }
  if (runs.empty()) return "none";
  std::string text;
  for (std::size_t i = 0; i < std::min(runs.size(), kMaxRuns); ++i) {
    if (i > 0) text += ", ";
    if (problem.batch.documents.size() > 1) text += fmt::format("d{} ", runs[i].document);
    text += fmt::format("{}-{}", runs[i].begin, runs[i].end - 1);
  }
  if (runs.size() > kMaxRuns) text += fmt::format(", and {} runs more", runs.size() - kMaxRuns);
  return text;
}

bool is_same_ownership(const RankSummary& rank) {
  return std::equal(rank.q.begin(), rank.q.end(), rank.kv.begin(), rank.kv.end(),
                    [](const OwnedChunk& a, const OwnedChunk& b) {
                      return a.document == b.document && a.first == b.first &&
                             a.num_tokens == b.num_tokens;
                    });
}

std::string gpu_text(const PlanSummary& summary, const GpuSummary& gpu) {
  std::string text =
      fmt::format("gpu      {} with {} multiprocessors: {}\n",
                  architecture_name(gpu.compute_capability), gpu.multiprocessors, gpu.origin);
  text += fmt::format("exchange {} ({})\n", gpu.exchange.name, gpu.exchange.why);
  for (const LaunchTiles& launch : summary.launches) {
    text += fmt::format(
        "{:<9}{}: a thread block of {} owns {} rows, {} pass by at a time, {} of "
        "shared memory\n",
        &launch == &summary.launches.front() ? "launches" : "", launch.result, launch.block_threads,
        launch.own_rows, launch.other_rows, bytes_text(launch.shared_bytes));
  }
  return text;
}

std::string head(const PlanSummary& summary) {
  const AttentionShape& shape = summary.problem.shape;
  const SequenceBatch& batch = summary.problem.batch;
  std::string text = fmt::format("plan     cp {}, {}, {}, {}, {} -> {}\n", summary.world_size,
                                 name_of(summary.config.mask), name_of(summary.config.sharding),
                                 name_of(summary.config.schedule), name_of(summary.problem.dtype),
                                 name_of(summary.problem.out_dtype));
  text += fmt::format("input    {}: {} document{}, {} query and {} key rows\n", summary.input,
                      batch.documents.size(), batch.documents.size() == 1 ? "" : "s", batch.q_rows,
                      batch.kv_rows);
  text += fmt::format("shape    heads {} over {} kv heads, head_dim {}, value_dim {}, scale {}\n",
                      shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim,
                      shape.softmax_scale);
  text += fmt::format("kernels  {}, {}, {} {}{}, chunks of {} tokens\n", summary.kernels,
                      summary.numerics, summary.num_threads,
                      summary.gpu ? "thread blocks at a time" : "thread",
                      summary.gpu                ? ""
                      : summary.num_threads == 1 ? " per rank"
                                                 : "s per rank",
                      summary.config.chunk_tokens);
  if (summary.gpu) text += gpu_text(summary, *summary.gpu);
  text += fmt::format("result   {}\n", summary.guarantee);
  return text;
}

/// What only a GPU needs: descriptions of the steps' work that its launches read.
std::string images_text(const PlanSummary& summary, std::size_t bytes) {
  return summary.gpu ? fmt::format(", descriptions of steps {}", bytes_text(bytes)) : "";
}

std::string ownership(const PlanSummary& summary) {
  std::string text = "\nrank  tokens it owns (positions in their document)\n";
  for (const RankSummary& rank : summary.ranks) {
    if (is_same_ownership(rank)) {
      text += fmt::format("{:>4}  {}\n", rank.rank, token_runs(summary.problem, rank.q));
    } else {
      text += fmt::format("{:>4}  q {}; kv {}\n", rank.rank, token_runs(summary.problem, rank.q),
                          token_runs(summary.problem, rank.kv));
    }
  }
  return text;
}

std::string load(const PlanSummary& summary) {
  double mean = 0.0;
  for (const RankSummary& rank : summary.ranks) mean += static_cast<double>(rank.visible_pairs);
  mean /= static_cast<double>(summary.ranks.size());
  std::string text =
      "\nrank  q tokens  kv tokens  visible pairs  of mean  blocks  merges       sends        "
      "memory  bytes/token\n";
  for (const RankSummary& rank : summary.ranks) {
    const double share = mean > 0.0 ? static_cast<double>(rank.visible_pairs) / mean : 1.0;
    text += fmt::format(
        "{:>4}  {:>8}  {:>9}  {:>13}  {:>7.3f}  {:>6}  {:>6}  {:>10}  {:>12}  {:>11.1f}\n",
        rank.rank, rank.q_tokens, rank.kv_tokens, rank.visible_pairs, share, rank.num_blocks,
        rank.num_merges, bytes_text(rank.bytes_on_wire), bytes_text(rank.memory.total()),
        rank.bytes_per_token());
  }
  text +=
      fmt::format("balance  the busiest rank computes {:.3f} times the mean\n", summary.imbalance);
  const auto largest = std::max_element(summary.ranks.begin(), summary.ranks.end(),
                                        [](const RankSummary& a, const RankSummary& b) {
                                          return a.memory.total() < b.memory.total();
                                        });
  const MemoryPlan& memory = largest->memory;
  text += fmt::format(
      "memory   largest on rank {}: inputs {}, outputs {}, ring slots {}, carried states {}, "
      "workspace {}{}\n",
      largest->rank, bytes_text(memory.inputs), bytes_text(memory.outputs),
      bytes_text(memory.ring_slots), bytes_text(memory.carried), bytes_text(memory.workspace),
      images_text(summary, memory.images + memory.maxima));
  return text;
}

/// The backward by rank; nothing when the kernels have none.
std::string backward_load(const PlanSummary& summary) {
  if (!summary.ranks.front().backward) return "";
  std::string text =
      "\nrank  backward: tasks    sums  pieces sent       sends        memory  bytes/token\n";
  const RankSummary* largest = &summary.ranks.front();
  for (const RankSummary& rank : summary.ranks) {
    const BackwardSummary& backward = *rank.backward;
    const std::size_t bytes = backward.memory.total();
    const double tokens = static_cast<double>(std::max<std::int64_t>(rank.num_tokens(), 1));
    text += fmt::format("{:>4}  {:>15}  {:>6}  {:>11}  {:>10}  {:>12}  {:>11.1f}\n", rank.rank,
                        backward.num_tasks, backward.num_sums, backward.num_pieces,
                        bytes_text(backward.bytes_on_wire), bytes_text(bytes),
                        static_cast<double>(bytes) / tokens);
    if (bytes > largest->backward->memory.total()) largest = &rank;
  }
  const GradientMemory& memory = largest->backward->memory;
  text += fmt::format(
      "memory   largest on rank {}: ring slots {}, packed queries {}, carried dq {}, carried dk dv "
      "{}, dk dv in a step {}, messages {}, workspace {}{}\n",
      largest->rank, bytes_text(memory.ring_slots), bytes_text(memory.queries),
      bytes_text(memory.carried_dq), bytes_text(memory.carried_dkv), bytes_text(memory.work_dkv),
      bytes_text(memory.messages), bytes_text(memory.workspace),
      images_text(summary, memory.images));
  return text;
}

/// What a rank takes of a GPU's memory beyond the caller's tensors.
std::string device_memory(const PlanSummary& summary) {
  if (!summary.gpu) return "";
  std::string text =
      "\nrank  device memory: packed shard     forward    backward    together  bytes/token\n";
  for (const RankSummary& rank : summary.ranks) {
    text += fmt::format("{:>4}  {:>27}  {:>10}  {:>10}  {:>10}  {:>11.1f}\n", rank.rank,
                        bytes_text(rank.packed_kv), bytes_text(rank.memory.own()),
                        bytes_text(rank.own_memory() - rank.memory.own()),
                        bytes_text(rank.own_memory()), rank.own_bytes_per_token());
  }
  return text +
         "         taken with the plan and with the first backward; the caller's tensors "
         "not counted\n";
}

std::string mask_text(const BlockMask& mask) {
  if (mask.kind == MaskKind::full) return "full";
  return fmt::format("causal{:+}", mask.first_row_limit);
}

/// Kv chunks [first, last] that a state covers; what a node of the merge tree is called by.
struct Cover {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
using Covers = std::map<SlotIndex, Cover>;

std::string op_text(const Plan& plan, const Shard& kv_shard, const StateOp& op, Covers& covers) {
  switch (op.kind) {
    case StateOpKind::block:
    case StateOpKind::accumulate: {
      const OwnedChunk& chunk = kv_shard.kv[static_cast<std::size_t>(op.kv_block)];
      covers[op.dst] = {chunk.chunk, chunk.chunk};
      return fmt::format("{} {} {} {}", slot_name(op.dst),
                         op.kind == StateOpKind::block ? "=" : "+=",
                         chunk_name(plan.problem(), chunk), mask_text(op.mask));
    }
    case StateOpKind::merge: {
      const Cover cover{covers[op.left].first, covers[op.right].last};
      covers[op.dst] = cover;
      return fmt::format("{} = {} * {} [{}-{}]", slot_name(op.dst), slot_name(op.left),
                         slot_name(op.right), cover.first, cover.last);
    }
    case StateOpKind::finalize:
      return fmt::format("out = {}", slot_name(op.left));
    case StateOpKind::finalize_empty:
      return "out = 0, lse = -inf";
  }
  return "?";
}

std::string step_text(const Plan& plan, std::size_t index, Covers& covers) {
  const Step& step = plan.schedule().steps[index];
  const Shard& kv_shard = plan.sharding().shards[static_cast<std::size_t>(step.kv_owner)];
  std::string text = fmt::format("  step {}: kv of rank {}", index, step.kv_owner);
  if (step.send_to >= 0) {
    const std::size_t held = plan.ring().bytes().held[index];
    const std::size_t passed_on = plan.ring().bytes().passed_on[index];
    const std::string what = passed_on == 0      ? "none of it"
                             : passed_on == held ? "it"
                                                 : "some of it";
    text += fmt::format("; sends {} to rank {} ({}), receives from rank {}", what, step.send_to,
                        bytes_text(passed_on), step.receive_from);
  }
  text += "\n";
  for (const ChunkProgram& program : step.programs) {
    const OwnedChunk& chunk = plan.shard().q[static_cast<std::size_t>(program.q_chunk)];
    text += fmt::format("    q {}:", chunk_name(plan.problem(), chunk));
    for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
      const StateOp& op = plan.schedule().ops[static_cast<std::size_t>(i)];
      text += (i == program.op_begin ? " " : "; ") + op_text(plan, kv_shard, op, covers);
    }
    text += "\n";
  }
  return text;
}

std::string count_text(std::int64_t pieces) {
  return pieces == 1 ? "1 piece" : fmt::format("{} pieces", pieces);
}

std::string backward_step_text(const BackwardStepSummary& step, std::size_t index) {
  std::string text = fmt::format("  backward step {}: kv of rank {}", index, step.kv_owner);
  if (step.pieces_from >= 0) {
    text += fmt::format("; sends it {} ({}), receives {} from rank {} ({})",
                        count_text(step.num_sent), bytes_text(step.bytes_out),
                        count_text(step.num_received), step.pieces_from, bytes_text(step.bytes_in));
  }
  text += "\n";
  for (const KvSummary& chunk : step.chunks) {
    text += fmt::format("    kv {}: q {} ->", chunk.kv, fmt::join(chunk.q, ", "));
    for (const SumRange& piece : chunk.pieces) text += " " + range_text(piece);
    text += "\n";
  }
  if (!step.finished.empty())
    text += fmt::format("    dk, dv whole: {}\n", fmt::join(step.finished, ", "));
  return text;
}

constexpr std::string_view kLegend =
    "\nsteps    s: state carried between steps, t: state inside a step; 's = c4 full': the state "
    "of "
    "kv chunk 4;\n"
    "         causal+n: row i sees the first i + n keys of the chunk; 'a * b [i-k]': merge of "
    "neighbours,\n"
    "         the tree node over kv chunks i to k; backward 'q c3, c4 -> [3-4]': what these q "
    "chunks add\n"
    "         to dk, dv of a kv chunk, as sums over q chunks [i-k]: pieces that go to its owner\n";

}  // namespace

std::string plan_text(const PlanSummary& summary) {
  std::string text = head(summary) + ownership(summary) + load(summary) + backward_load(summary) +
                     device_memory(summary);
  if (summary.detailed.empty()) {
    return text + (summary.wanted_rank
                       ? fmt::format("steps    there is no rank {} here\n", *summary.wanted_rank)
                       : "steps    too many to print; --rank R prints those of rank R\n");
  }
  text += kLegend;
  for (std::size_t p = 0; p < summary.detailed.size(); ++p) {
    const Plan& plan = summary.detailed[p];
    text += fmt::format("rank {}\n", plan.rank());
    Covers covers;
    for (std::size_t i = 0; i < plan.schedule().steps.size(); ++i) {
      text += step_text(plan, i, covers);
    }
    const std::vector<BackwardStepSummary>& backward = summary.detailed_backward[p];
    for (std::size_t i = 0; i < backward.size(); ++i) text += backward_step_text(backward[i], i);
  }
  return text;
}

}  // namespace cpattn
