#include "launch/parity_lane.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cp/plan.h"
#include "cp/ring_attention.h"
#include "src/base/error.h"
#include "src/comm/communicator.h"
#include "src/device/memory.h"

namespace cpattn {
namespace {

bool shares_baseline(const LaneSpec& a, const LaneSpec& b) {
  return a.source == b.source && a.lane.mask == b.lane.mask && a.lane.dtype == b.lane.dtype &&
         a.lane.schedule == b.lane.schedule;
}

/// A tensor and the memory it looks at.
struct OwnedTensor {
  Buffer memory;
  AnyTensor view;
};

OwnedTensor make_tensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  OwnedTensor tensor;
  tensor.memory = Buffer(static_cast<std::size_t>(rows * heads * dim) * size_of(dtype));
  tensor.view =
      contiguous_tensor(static_cast<void*>(tensor.memory.data()), dtype, {rows, heads, dim});
  return tensor;
}

AnyTensor rows_of(const AnyTensor& tensor, std::int64_t begin, std::int64_t count) {
  AnyTensor part = tensor;
  part.shape[0] = count;
  part.data = tensor.row(begin, 0);
  return part;
}

/// Only the rows of these chunks are read.
void load_chunks(const InputSource& source, TensorRole role, const std::vector<OwnedChunk>& chunks,
                 const AnyTensor& tensor) {
  for (const OwnedChunk& chunk : chunks) {
    source.read(role, chunk.row_begin, rows_of(tensor, chunk.local_begin, chunk.num_tokens));
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::int64_t peak_rss_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

/// What a rank sends to rank 0: receipt, out rows, lse rows, one after the other.
std::vector<std::byte> pack_delivery(const RankReceipt& receipt, const OwnedTensor& out,
                                     const Buffer& lse) {
  const std::string text = to_text(receipt);
  const std::uint64_t text_bytes = text.size();
  std::vector<std::byte> bytes(sizeof(text_bytes) + text.size() + out.memory.size_bytes() +
                               lse.size_bytes());
  std::byte* place = bytes.data();
  const auto append = [&](const void* from, std::size_t size) {
    if (size == 0) return;
    std::memcpy(place, from, size);
    place += size;
  };
  append(&text_bytes, sizeof(text_bytes));
  append(text.data(), text.size());
  append(out.memory.data(), out.memory.size_bytes());
  append(lse.data(), lse.size_bytes());
  return bytes;
}

/// Puts one rank's rows where they belong and counts them.
void unpack_delivery(const std::vector<std::byte>& bytes, const std::vector<std::int64_t>& rows,
                     LaneResult& result) {
  std::uint64_t text_bytes = 0;
  const std::size_t row_out =
      static_cast<std::size_t>(result.heads * result.value_dim) * size_of(result.out_dtype);
  const std::size_t row_lse = static_cast<std::size_t>(result.heads) * sizeof(float);
  invariant(bytes.size() >= sizeof(text_bytes), "a delivery without a receipt");
  std::memcpy(&text_bytes, bytes.data(), sizeof(text_bytes));
  invariant(bytes.size() == sizeof(text_bytes) + text_bytes + rows.size() * (row_out + row_lse),
            "a delivery of ", bytes.size(), " bytes for ", rows.size(), " rows");
  const std::byte* place = bytes.data() + sizeof(text_bytes);
  result.ranks.push_back(receipt_from_text(
      {reinterpret_cast<const char*>(place), static_cast<std::size_t>(text_bytes)}));
  place += text_bytes;
  const std::byte* lse = place + rows.size() * row_out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::size_t>(rows[i]);
    std::memcpy(result.out.data() + row * row_out, place + i * row_out, row_out);
    std::memcpy(result.lse.data() + row * row_lse, lse + i * row_lse, row_lse);
    auto& count = result.deliveries.as<unsigned char>()[row];
    if (count < 255) ++count;
  }
}

/// The tensors of one rank's lane.
struct LocalTensors {
  OwnedTensor q, k, v, out;
  Buffer lse;

  ForwardTensors forward_tensors(std::int64_t rows, std::int64_t heads) const {
    return {q.view, k.view, v.view, out.view,
            contiguous_view(lse.as<float>(), std::array<std::int64_t, 2>{rows, heads})};
  }
};

LocalTensors load_tensors(const LaneRun& run, const Plan& plan, Fault& fault) {
  const Problem& problem = plan.problem();
  const AttentionShape& shape = problem.shape;
  const Shard& shard = plan.shard();
  LocalTensors local;
  local.q = make_tensor(problem.dtype, shard.q_rows, shape.num_heads, shape.head_dim);
  local.k = make_tensor(problem.dtype, shard.kv_rows, shape.num_kv_heads, shape.head_dim);
  local.v = make_tensor(problem.dtype, shard.kv_rows, shape.num_kv_heads, shape.value_dim);
  local.out = make_tensor(problem.out_dtype, shard.q_rows, shape.num_heads, shape.value_dim);
  local.lse = Buffer(static_cast<std::size_t>(shard.q_rows * shape.num_heads) * sizeof(float));
  load_chunks(run.source, TensorRole::q, shard.q, local.q.view);
  load_chunks(run.source, TensorRole::k, shard.kv, local.k.view);
  load_chunks(run.source, TensorRole::v, shard.kv, local.v.view);
  fault.plant_in_kv(local.k.view);
  fault.plant_in_kv(local.v.view);
  return local;
}

}  // namespace

std::vector<LaneSpec> lane_specs(const RunConfig& config, std::size_t num_sources) {
  std::vector<LaneSpec> specs;
  for (std::size_t source = 0; source < num_sources; ++source) {
    for (const LaneConfig& lane : lanes_of(config)) {
      specs.push_back({static_cast<std::int64_t>(source), lane});
    }
  }
  return specs;
}

std::vector<LaneSpec> baseline_specs(const RunConfig& config, std::size_t num_sources) {
  std::vector<LaneSpec> baselines;
  for (const LaneSpec& spec : lane_specs(config, num_sources)) {
    if (baseline_index(baselines, spec) == baselines.size()) baselines.push_back(spec);
  }
  return baselines;
}

std::size_t baseline_index(const std::vector<LaneSpec>& baselines, const LaneSpec& lane) {
  const auto found =
      std::find_if(baselines.begin(), baselines.end(),
                   [&](const LaneSpec& baseline) { return shares_baseline(baseline, lane); });
  return static_cast<std::size_t>(found - baselines.begin());
}

std::optional<FaultKind> fault_of_lane(const RunConfig& config, const LaneSpec& spec,
                                       std::int64_t cp, const InputInfo& input) {
  const std::optional<FaultKind> fault = fault_from_option(config.inject);
  const bool is_asked = std::find(config.cp.begin(), config.cp.end(), cp) != config.cp.end();
  if (!fault || !is_asked || !what_fault_needs(*fault, spec.lane, cp, input).empty()) {
    return std::nullopt;
  }
  return fault;
}

std::optional<LaneResult> run_lane(const LaneRun& run, World& world) {
  Fault fault(run.fault);
  Communicator& comm = fault.plant(world.comm);
  const Seconds timeout(run.config.cp_config.timeout_seconds);
  CpConfig cp_config = cp_config_of(run.config, run.lane);
  cp_config.threads = threads_per_rank(cp_config.threads, world.local_ranks);
  Problem problem = problem_of(run.config, run.lane, run.source.info());
  fault.plant(problem);
  Plan plan(problem, cp_config, kernels_of(run.config), comm.rank(), comm.size());
  fault.plant(plan);

  const LocalTensors local = load_tensors(run, plan, fault);
  const ForwardTensors tensors =
      local.forward_tensors(plan.shard().q_rows, problem.shape.num_heads);
  RingAttention attention(plan, comm);
  comm.barrier(deadline_after(timeout), "start of a lane");
  const Clock::time_point start = Clock::now();
  attention.forward(tensors);
  RankReceipt receipt;
  receipt.seconds = Seconds(Clock::now() - start).count();
  fault.plant_in_results(plan, tensors.out, tensors.lse);

  const RingStats& stats = attention.stats();
  receipt.rank = comm.rank();
  receipt.host = host_name();
  receipt.pid = ::getpid();
  receipt.rows = plan.shard().q_rows;
  receipt.bytes_sent = static_cast<std::int64_t>(stats.bytes_sent);
  receipt.messages = stats.messages_posted;
  receipt.exposed_seconds = stats.exposed_seconds;
  receipt.peak_rss_bytes = peak_rss_bytes();
  receipt.fault_sites = fault.sites();
  const auto deliveries = comm.gather(pack_delivery(receipt, local.out, local.lse), 0,
                                      deadline_after(timeout), "gather of the results");
  if (comm.rank() != 0) return std::nullopt;

  LaneResult result = make_lane_result(problem.batch.q_rows, problem.shape.num_heads,
                                       problem.shape.value_dim, problem.out_dtype);
  for (std::size_t rank = 0; rank < deliveries.size(); ++rank) {
    unpack_delivery(deliveries[rank], global_rows(plan.sharding().shards[rank].q), result);
  }
  result.transport = comm.transport();
  result.guarantee = plan.guarantee();
  result.isa = plan.kernels().name;
  result.numerics = plan.kernels().numerics(problem.dtype);
  result.threads = plan.num_threads();
  return result;
}

}  // namespace cpattn
