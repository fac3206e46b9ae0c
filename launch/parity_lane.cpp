#include "launch/parity_lane.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "cp/gradient_plan.h"
#include "cp/plan.h"
#include "cp/ring_attention.h"
#include "cp/ring_gradient.h"
#include "launch/parity_delivery.h"
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

/// The tensors of one rank's lane.
struct LocalTensors {
  OwnedTensor q, k, v, dout, dlse;
  std::vector<ResultTensor> results;

  AnyTensor result(ResultRole role) const {
    for (const ResultTensor& tensor : results) {
      if (tensor.role == role) return tensor.view();
    }
    return {};
  }
  TensorView<float, 2> lse() const { return rows_and_heads(result(ResultRole::lse)); }
  /// As the kernels see them.
  ForwardTensors forward(PlacedTensors& placed) const {
    return {placed.input(q.view), placed.input(k.view), placed.input(v.view),
            placed.output(result(ResultRole::out)), placed.output(lse())};
  }
  /// With the out that the backward is to believe in.
  BackwardTensors backward(const AnyConstTensor& out, PlacedTensors& placed) const {
    return {placed.input(q.view),
            placed.input(k.view),
            placed.input(v.view),
            placed.input(out),
            as_input(placed.input(as_input(lse()))),
            placed.input(dout.view),
            as_input(placed.input(as_input(rows_and_heads(dlse.view)))),
            placed.output(result(ResultRole::dq)),
            placed.output(result(ResultRole::dk)),
            placed.output(result(ResultRole::dv))};
  }

 private:
  static TensorView<const float, 2> as_input(const TensorView<float, 2>& view) {
    return {view.data, view.shape, view.strides};
  }
  static TensorView<float, 2> rows_and_heads(const AnyTensor& tensor) {
    return contiguous_view(static_cast<float*>(tensor.data),
                           std::array<std::int64_t, 2>{tensor.shape[0], tensor.shape[1]});
  }
};

/// As a trainer would have it: of out's type where that is the type of the inputs, else f32 (which
/// every backward takes). Either way the values are rounded to the type of the inputs.
OwnedTensor load_dout(const LaneRun& run, const Problem& problem, const Shard& shard) {
  const AttentionShape& shape = problem.shape;
  OwnedTensor rounded = make_tensor(problem.dtype, shard.q_rows, shape.num_heads, shape.value_dim);
  load_chunks(run.source, TensorRole::dout, shard.q, rounded.view);
  if (problem.dtype == problem.out_dtype || problem.dtype == DType::f32) return rounded;
  OwnedTensor dout = make_tensor(DType::f32, shard.q_rows, shape.num_heads, shape.value_dim);
  const std::int64_t elements = shard.q_rows * shape.num_heads * shape.value_dim;
  for (std::int64_t i = 0; i < elements; ++i) {
    dout.memory.as<float>()[i] = load_as_float(rounded.view.data, problem.dtype, i);
  }
  return dout;
}

LocalTensors load_tensors(const LaneRun& run, const Plan& plan, Fault& fault) {
  const Problem& problem = plan.problem();
  const AttentionShape& shape = problem.shape;
  const Shard& shard = plan.shard();
  LocalTensors local;
  local.q = make_tensor(problem.dtype, shard.q_rows, shape.num_heads, shape.head_dim);
  local.k = make_tensor(problem.dtype, shard.kv_rows, shape.num_kv_heads, shape.head_dim);
  local.v = make_tensor(problem.dtype, shard.kv_rows, shape.num_kv_heads, shape.value_dim);
  load_chunks(run.source, TensorRole::q, shard.q, local.q.view);
  load_chunks(run.source, TensorRole::k, shard.kv, local.k.view);
  load_chunks(run.source, TensorRole::v, shard.kv, local.v.view);
  fault.plant_in_kv(local.k.view);
  fault.plant_in_kv(local.v.view);
  const bool has_backward = has_gradients(run.config);
  local.results = make_result_tensors(problem, has_backward, shard.q_rows, shard.kv_rows);
  if (!has_backward) return local;
  local.dout = load_dout(run, problem, shard);
  if (run.config.dlse) {
    local.dlse = make_tensor(DType::f32, shard.q_rows, shape.num_heads, 1);
    load_chunks(run.source, TensorRole::dlse, shard.q, local.dlse.view);
  }
  return local;
}

/// Runs the forward again with nothing but what is here before the first hop: an out that is no
/// rank's to believe in.
OwnedTensor partial_out(const Plan& plan, const LocalTensors& local, Communicator& comm,
                        Fault& fault) {
  const Problem& problem = plan.problem();
  Plan blind(problem, plan.config(), plan.kernels(), plan.rank(), plan.world_size());
  fault.blind_all_hops(blind);
  OwnedTensor out = make_tensor(problem.out_dtype, plan.shard().q_rows, problem.shape.num_heads,
                                problem.shape.value_dim);
  OwnedTensor lse = make_tensor(DType::f32, plan.shard().q_rows, problem.shape.num_heads, 1);
  PlacedTensors placed(comm.device());
  ForwardTensors tensors = local.forward(placed);
  tensors.out = out.view;
  tensors.lse.data = lse.memory.as<float>();
  RingAttention(blind, comm).forward(tensors);
  return out;
}

void add(const TransferStats& stats, RankReceipt& receipt) {
  receipt.bytes_sent += static_cast<std::int64_t>(stats.bytes_sent);
  receipt.messages += stats.messages_posted;
  receipt.exposed_seconds += stats.exposed_seconds;
}

/// Seconds of `work` on all ranks together, to the end of what it gave to the stream.
template <class Work>
double timed(const LaneRun& run, ShardTransport& transport, Stream stream, std::string_view what,
             const Work& work) {
  const Seconds timeout(run.config.cp_config.timeout_seconds);
  transport.control().barrier(deadline_after(timeout), what);
  const Clock::time_point start = Clock::now();
  work();
  transport.synchronize(stream, deadline_after(timeout));
  return Seconds(Clock::now() - start).count();
}

void run_backward(const LaneRun& run, const Plan& plan, const LocalTensors& local,
                  ShardTransport& transport, Stream stream, Fault& fault, RankReceipt& receipt) {
  GradientPlan gradient_plan(plan);
  fault.plant(gradient_plan);
  RingGradient gradient(plan, gradient_plan, transport);
  AnyConstTensor out = local.result(ResultRole::out);
  OwnedTensor partial;
  if (fault.believes_partial_out()) {
    partial = partial_out(plan, local, transport.control(), fault);
    out = partial.view;
  }
  PlacedTensors placed(transport.device());
  const BackwardTensors tensors = local.backward(out, placed);
  receipt.backward_seconds = timed(run, transport, stream, "start of a backward",
                                   [&] { gradient.backward(tensors, stream); });
  placed.fetch();
  receipt.seconds += receipt.backward_seconds;
  for (const TransferStats& stats : {gradient.ring_stats(), gradient.piece_stats()})
    add(stats, receipt);
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
  if (!fault || !is_asked ||
      !what_fault_needs(*fault, {spec.lane, config.direction, cp, input}).empty()) {
    return std::nullopt;
  }
  return fault;
}

std::optional<LaneResult> run_lane(const LaneRun& run, World& world, const ShardPlace& place) {
  Fault fault(run.fault);
  Communicator& comm = fault.plant(world.comm);
  ShardTransport& transport = place.transport(comm);
  CpConfig cp_config = cp_config_of(run.config, run.lane);
  cp_config.threads = threads_per_rank(cp_config.threads, world.local_ranks);
  Problem problem = problem_of(run.config, run.lane, run.source.info());
  fault.plant(problem);
  Plan plan(problem, cp_config, place.kernels(), comm.rank(), comm.size());
  fault.plant(plan);

  const LocalTensors local = load_tensors(run, plan, fault);
  RingAttention attention(plan, transport);
  PlacedTensors placed(transport.device());
  const ForwardTensors tensors = local.forward(placed);
  RankReceipt receipt;
  receipt.seconds = timed(run, transport, place.stream(), "start of a lane",
                          [&] { attention.forward(tensors, place.stream()); });
  placed.fetch();
  if (has_gradients(run.config))
    run_backward(run, plan, local, transport, place.stream(), fault, receipt);
  fault.plant_in_results(plan, local.results);

  add(attention.stats(), receipt);
  receipt.rank = comm.rank();
  receipt.host = host_name();
  receipt.pid = ::getpid();
  receipt.rows = plan.shard().q_rows;
  receipt.peak_rss_bytes = peak_rss_bytes();
  receipt.fault_sites = fault.sites();
  const auto deliveries =
      comm.gather(pack_delivery(receipt, local.results), 0,
                  deadline_after(Seconds(cp_config.timeout_seconds)), "gather of the results");
  if (comm.rank() != 0) return std::nullopt;

  LaneResult result = make_lane_result(problem, has_gradients(run.config));
  for (std::size_t rank = 0; rank < deliveries.size(); ++rank) {
    unpack_delivery(deliveries[rank], plan.sharding().shards[rank], result);
  }
  result.transport = transport.transport();
  result.guarantee = plan.guarantee();
  result.isa = plan.kernels().name;
  result.numerics = plan.kernels().numerics(problem.dtype);
  result.threads = plan.num_threads();
  return result;
}

}  // namespace cpattn
