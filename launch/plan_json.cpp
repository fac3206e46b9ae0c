#include "launch/plan_json.h"

#include <nlohmann/json.hpp>
#include <sstream>

namespace cpattn {
namespace {

using Json = nlohmann::ordered_json;

Json chunks_json(const std::vector<OwnedChunk>& chunks) {
  Json list = Json::array();
  for (const OwnedChunk& chunk : chunks) {
    list.push_back({{"document", chunk.document},
                    {"chunk", chunk.chunk},
                    {"first", chunk.first},
                    {"tokens", chunk.num_tokens},
                    {"row", chunk.row_begin}});
  }
  return list;
}

Json memory_json(const RankSummary& rank) {
  const MemoryPlan& memory = rank.memory;
  return {{"inputs", memory.inputs},
          {"outputs", memory.outputs},
          {"ring_slots", memory.ring_slots},
          {"carried", memory.carried},
          {"workspace", memory.workspace},
          {"images", memory.images},
          {"maxima", memory.maxima},
          {"total", memory.total()},
          {"bytes_per_token", rank.bytes_per_token()}};
}

Json backward_json(const BackwardSummary& backward) {
  const GradientMemory& memory = backward.memory;
  return {{"tasks", backward.num_tasks},
          {"sums", backward.num_sums},
          {"pieces_sent", backward.num_pieces},
          {"bytes_on_wire", backward.bytes_on_wire},
          {"memory",
           {{"ring_slots", memory.ring_slots},
            {"queries", memory.queries},
            {"carried_dq", memory.carried_dq},
            {"carried_dkv", memory.carried_dkv},
            {"work_dkv", memory.work_dkv},
            {"messages", memory.messages},
            {"workspace", memory.workspace},
            {"images", memory.images},
            {"total", memory.total()}}}};
}

Json backward_step_json(const BackwardStepSummary& step, std::size_t index) {
  Json json{{"step", index}, {"kv_owner", step.kv_owner}};
  json["pieces_from"] = step.pieces_from >= 0 ? Json(step.pieces_from) : Json(nullptr);
  json["pieces_sent"] = step.num_sent;
  json["bytes_sent"] = step.bytes_out;
  json["pieces_received"] = step.num_received;
  json["bytes_received"] = step.bytes_in;
  json["chunks"] = Json::array();
  for (const KvSummary& chunk : step.chunks) {
    Json pieces = Json::array();
    for (const SumRange& piece : chunk.pieces)
      pieces.push_back(Json::array({piece.first, piece.last}));
    json["chunks"].push_back({{"kv", chunk.kv}, {"q", chunk.q}, {"pieces", pieces}});
  }
  json["finished"] = step.finished;
  return json;
}

Json rank_json(const RankSummary& rank) {
  Json json{{"rank", rank.rank},
            {"q_tokens", rank.q_tokens},
            {"kv_tokens", rank.kv_tokens},
            {"q_chunks", chunks_json(rank.q)},
            {"kv_chunks", chunks_json(rank.kv)},
            {"visible_pairs", rank.visible_pairs},
            {"blocks", rank.num_blocks},
            {"merges", rank.num_merges},
            {"bytes_on_wire", rank.bytes_on_wire},
            {"packed_kv", rank.packed_kv},
            {"memory", memory_json(rank)},
            {"own_memory",
             {{"total", rank.own_memory()}, {"bytes_per_token", rank.own_bytes_per_token()}}}};
  if (rank.backward) json["backward"] = backward_json(*rank.backward);
  return json;
}

Json block_json(const Plan& plan, const Shard& kv_shard, const StateOp& op, const char* name) {
  Json json{{"op", name},
            {"dst", slot_name(op.dst)},
            {"kv", chunk_name(plan.problem(), kv_shard.kv[static_cast<std::size_t>(op.kv_block)])},
            {"mask", name_of(op.mask.kind)}};
  if (op.mask.kind == MaskKind::causal) json["first_row_sees"] = op.mask.first_row_limit;
  return json;
}

Json op_json(const Plan& plan, const Shard& kv_shard, const StateOp& op) {
  switch (op.kind) {
    case StateOpKind::block:
      return block_json(plan, kv_shard, op, "block");
    case StateOpKind::accumulate:
      return block_json(plan, kv_shard, op, "accumulate");
    case StateOpKind::merge:
      return {{"op", "merge"},
              {"dst", slot_name(op.dst)},
              {"left", slot_name(op.left)},
              {"right", slot_name(op.right)}};
    case StateOpKind::finalize:
      return {{"op", "finalize"}, {"left", slot_name(op.left)}};
    case StateOpKind::finalize_empty:
      return {{"op", "finalize_empty"}};
  }
  return nullptr;
}

Json step_json(const Plan& plan, std::size_t index) {
  const Step& step = plan.schedule().steps[index];
  const auto owner = static_cast<std::size_t>(step.kv_owner);
  Json json{{"step", index}, {"kv_owner", step.kv_owner}};
  json["send_to"] = step.send_to >= 0 ? Json(step.send_to) : Json(nullptr);
  json["receive_from"] = step.receive_from >= 0 ? Json(step.receive_from) : Json(nullptr);
  json["bytes_sent"] = plan.ring().bytes().passed_on[index];
  json["programs"] = Json::array();
  for (const ChunkProgram& program : step.programs) {
    Json ops = Json::array();
    for (std::int64_t i = program.op_begin; i < program.op_end; ++i) {
      ops.push_back(op_json(plan, plan.sharding().shards[owner],
                            plan.schedule().ops[static_cast<std::size_t>(i)]));
    }
    const OwnedChunk& chunk = plan.shard().q[static_cast<std::size_t>(program.q_chunk)];
    json["programs"].push_back({{"q", chunk_name(plan.problem(), chunk)}, {"ops", ops}});
  }
  return json;
}

Json agreement_json(const std::string& lines) {
  Json json = Json::object();
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos) json[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return json;
}

Json gpu_json(const PlanSummary& summary, const GpuSummary& gpu) {
  Json json{{"architecture", architecture_name(gpu.compute_capability)},
            {"multiprocessors", gpu.multiprocessors},
            {"origin", gpu.origin},
            {"exchange", gpu.exchange.name},
            {"why_exchange", gpu.exchange.why}};
  json["launches"] = Json::array();
  for (const LaunchTiles& launch : summary.launches) {
    json["launches"].push_back({{"result", launch.result},
                                {"own_rows", launch.own_rows},
                                {"other_rows", launch.other_rows},
                                {"block_threads", launch.block_threads},
                                {"shared_bytes", launch.shared_bytes}});
  }
  return json;
}

Json summary_json(const PlanSummary& summary) {
  const AttentionShape& shape = summary.problem.shape;
  const SequenceBatch& batch = summary.problem.batch;
  Json json{{"cp", summary.world_size},
            {"mask", name_of(summary.config.mask)},
            {"sharding", name_of(summary.config.sharding)},
            {"schedule", name_of(summary.config.schedule)},
            {"dtype", name_of(summary.problem.dtype)},
            {"out_dtype", name_of(summary.problem.out_dtype)},
            {"input", summary.input},
            {"documents", batch.documents.size()},
            {"q_rows", batch.q_rows},
            {"kv_rows", batch.kv_rows},
            {"heads", shape.num_heads},
            {"kv_heads", shape.num_kv_heads},
            {"head_dim", shape.head_dim},
            {"value_dim", shape.value_dim},
            {"softmax_scale", shape.softmax_scale},
            {"chunk_tokens", summary.config.chunk_tokens},
            {"kernels", summary.kernels},
            {"numerics", summary.numerics},
            {summary.gpu ? "thread_blocks" : "threads", summary.num_threads},
            {"guarantee", summary.guarantee},
            {"imbalance", summary.imbalance},
            {"agreement", agreement_json(summary.agreement_lines)}};
  if (summary.gpu) json["gpu"] = gpu_json(summary, *summary.gpu);
  json["ranks"] = Json::array();
  for (const RankSummary& rank : summary.ranks) json["ranks"].push_back(rank_json(rank));
  for (std::size_t p = 0; p < summary.detailed.size(); ++p) {
    const Plan& plan = summary.detailed[p];
    Json steps = Json::array();
    for (std::size_t i = 0; i < plan.schedule().steps.size(); ++i) {
      steps.push_back(step_json(plan, i));
    }
    Json& rank = json["ranks"][static_cast<std::size_t>(plan.rank())];
    rank["steps"] = steps;
    const std::vector<BackwardStepSummary>& backward = summary.detailed_backward[p];
    for (std::size_t i = 0; i < backward.size(); ++i)
      rank["backward"]["steps"].push_back(backward_step_json(backward[i], i));
  }
  return json;
}

}  // namespace

std::string plan_json(std::span<const PlanSummary> summaries) {
  Json json;
  json["plans"] = Json::array();
  for (const PlanSummary& summary : summaries) json["plans"].push_back(summary_json(summary));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace cpattn
