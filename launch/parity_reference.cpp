#include "launch/parity_reference.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <set>

#include "cp/sharding.h"
#include "kernels/reference/attention.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

RowMap make_row_map(std::vector<OwnedChunk> chunks, std::int64_t num_rows) {
  RowMap map;
  map.chunks = std::move(chunks);
  map.chunk_of_row.assign(static_cast<std::size_t>(num_rows), -1);
  for (std::size_t i = 0; i < map.chunks.size(); ++i) {
    const OwnedChunk& chunk = map.chunks[i];
    std::fill_n(map.chunk_of_row.begin() + chunk.row_begin, chunk.num_tokens,
                static_cast<std::int32_t>(i));
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (map.chunk_of_row[static_cast<std::size_t>(row)] >= 0) map.rows.push_back(row);
  }
  return map;
}

/// A global tensor of one role, of which only some rows are filled (untouched pages cost nothing).
struct GlobalTensor {
  Buffer memory;
  AnyTensor view;
};

GlobalTensor read_rows(const InputSource& source, TensorRole role, DType dtype,
                       const std::array<std::int64_t, 3>& shape,
                       const std::vector<std::int64_t>& rows) {
  GlobalTensor tensor;
  tensor.memory = Buffer(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]) * size_of(dtype));
  tensor.view = contiguous_tensor(static_cast<void*>(tensor.memory.data()), dtype, shape);
  for (std::size_t i = 0; i < rows.size();) {
    std::size_t end = i + 1;  // neighbouring rows are read together
    while (end < rows.size() && rows[end] == rows[end - 1] + 1) ++end;
    AnyTensor part = tensor.view;
    part.shape[0] = static_cast<std::int64_t>(end - i);
    part.data = tensor.view.row(rows[i], 0);
    source.read(role, rows[i], part);
    i = end;
  }
  return tensor;
}

/// The inputs of a problem as the reference reads them.
struct GlobalInputs {
  GlobalTensor q, k, v, dout, dlse;
};

GlobalInputs read_inputs(const ReferenceRequest& request, const Problem& problem,
                         const std::vector<std::int64_t>& q_rows) {
  const AttentionShape& shape = problem.shape;
  const SequenceBatch& batch = problem.batch;
  const std::vector<std::int64_t>& kv_rows = request.maps.kv.rows;
  const auto read = [&](TensorRole role, DType dtype, std::int64_t rows, std::int64_t heads,
                        std::int64_t dim, const std::vector<std::int64_t>& which) {
    return read_rows(request.source, role, dtype, {rows, heads, dim}, which);
  };
  GlobalInputs inputs;
  inputs.q =
      read(TensorRole::q, problem.dtype, batch.q_rows, shape.num_heads, shape.head_dim, q_rows);
  inputs.k = read(TensorRole::k, problem.dtype, batch.kv_rows, shape.num_kv_heads, shape.head_dim,
                  kv_rows);
  inputs.v = read(TensorRole::v, problem.dtype, batch.kv_rows, shape.num_kv_heads, shape.value_dim,
                  kv_rows);
  if (!has_gradients(request.config)) return inputs;
  inputs.dout =
      read(TensorRole::dout, problem.dtype, batch.q_rows, shape.num_heads, shape.value_dim, q_rows);
  if (request.config.dlse) {
    inputs.dlse = read(TensorRole::dlse, DType::f32, batch.q_rows, shape.num_heads, 1, q_rows);
  }
  return inputs;
}

void set_chunks(ReferenceRows& rows, const RowMap& map) {
  for (const std::int64_t row : rows.rows) {
    rows.chunk_of_row.push_back(map.chunk_of_row[static_cast<std::size_t>(row)]);
  }
}

/// [rows, heads, dim] of doubles.
reference::Tensor tensor_of(const std::vector<double>& values, std::int64_t heads,
                            std::int64_t dim) {
  const auto rows = static_cast<std::int64_t>(values.size()) / (heads * dim);
  return contiguous_view(values.data(), std::array<std::int64_t, 3>{rows, heads, dim});
}

void replace(std::vector<double>& all, const std::vector<double>& some,
             const std::vector<std::int64_t>& rows, std::size_t heads) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(
        some.begin() + static_cast<std::ptrdiff_t>(i * heads), heads,
        all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rows[i]) * heads));
  }
}

/// Exact lse and delta of the rows that were computed; of the others what the single-rank run left.
reference::RowStatistics statistics_of(const ReferenceRequest& request,
                                       const reference::GradientArgs& args,
                                       const Reference& exact) {
  const std::int64_t heads = args.shape.num_heads;
  const auto states = static_cast<std::size_t>(args.batch.q_rows * heads);
  reference::RowStatistics all;
  if (request.single_rank != nullptr && exact.q.rows.size() < request.maps.q.rows.size()) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(args.batch.q_rows));
    std::iota(rows.begin(), rows.end(), 0);
    all = reference::statistics_of(args, rows, request.single_rank->find(ResultRole::out)->view(),
                                   request.single_rank->find(ResultRole::lse)->view(), {});
  } else {
    const std::vector<double> zeros(states);
    all = {zeros, zeros, zeros, zeros};
  }
  const reference::RowStatistics some = reference::statistics_of(
      args, exact.q.rows, tensor_of(exact.out, heads, args.shape.value_dim),
      tensor_of(exact.lse, heads, 1), exact.logit_size);
  const auto num_heads = static_cast<std::size_t>(heads);
  replace(all.lse, some.lse, exact.q.rows, num_heads);
  replace(all.logit_size, some.logit_size, exact.q.rows, num_heads);
  replace(all.delta, some.delta, exact.q.rows, num_heads);
  replace(all.delta_size, some.delta_size, exact.q.rows, num_heads);
  return all;
}

/// Flop of all rows of a problem: of out, lse (and dq), and of dk and dv.
struct Flop {
  double q = 0.0;
  double kv = 0.0;
};

Flop flop_of(const AttentionShape& shape, double pairs, bool has_gradients) {
  const double flop = 2.0 * pairs * static_cast<double>(shape.num_heads);
  const auto head_dim = static_cast<double>(shape.head_dim);
  const auto value_dim = static_cast<double>(shape.value_dim);
  const double forward = flop * (head_dim + value_dim);
  if (!has_gradients) return {forward, 0.0};
  return {forward + flop * (2.0 * head_dim + value_dim), flop * (2.0 * head_dim + 2.0 * value_dim)};
}

/// Rows of every head of every chunk, and the sizes of their logits and terms.
std::vector<BoundedGroup> bounded_groups(const Reference& exact, std::size_t num_chunks,
                                         std::int64_t num_heads) {
  const auto heads = static_cast<std::size_t>(num_heads);
  std::vector<BoundedGroup> groups(num_chunks * heads, {.rows = 0});
  for (std::size_t i = 0; i < exact.logit_size.size(); ++i) {
    const auto chunk = static_cast<std::size_t>(exact.q.chunk_of_row[i / heads]);
    BoundedGroup& group = groups[chunk * heads + i % heads];
    ++group.rows;
    const auto square_of = [i](const std::vector<double>& sizes) {
      return std::isfinite(sizes[i]) ? sizes[i] * sizes[i] : 0.0;
    };
    group.logit_magnitude += square_of(exact.logit_size);
    group.logit_size += square_of(exact.logit_size) + square_of(exact.part_size);
    group.term_size += square_of(exact.term_size);
  }
  for (BoundedGroup& group : groups) {
    if (group.rows == 0) continue;
    group.logit_magnitude = std::sqrt(group.logit_magnitude / static_cast<double>(group.rows));
    group.logit_size = std::sqrt(group.logit_size);
    group.term_size = std::sqrt(group.term_size);
  }
  return groups;
}

}  // namespace

std::vector<std::int64_t> choose_reference_rows(const std::vector<OwnedChunk>& chunks,
                                                double flop_of_all, double flop_budget,
                                                std::int64_t asked) {
  std::vector<std::int64_t> all;
  std::vector<std::int64_t> edges;
  for (const OwnedChunk& chunk : chunks) {
    if (chunk.num_tokens == 0) continue;
    edges.push_back(chunk.row_begin);
    edges.push_back(chunk.row_begin + chunk.num_tokens - 1);
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) all.push_back(chunk.row_begin + i);
  }
  std::sort(all.begin(), all.end());
  std::sort(edges.begin(), edges.end());
  const auto total = static_cast<std::int64_t>(all.size());
  std::int64_t count = total;
  if (asked > 0) {
    count = std::min(asked, total);
  } else if (flop_of_all > flop_budget) {
    count = static_cast<std::int64_t>(static_cast<double>(total) * (flop_budget / flop_of_all));
    count = std::clamp<std::int64_t>(count, std::min<std::int64_t>(total, 2), total);
  }
  if (count == total) return all;

  std::set<std::int64_t> chosen;
  const auto spread = [&](const std::vector<std::int64_t>& from, std::int64_t number) {
    const auto size = static_cast<std::int64_t>(from.size());
    for (std::int64_t i = 0; i < std::min(number, size); ++i) {
      const std::int64_t last = std::max<std::int64_t>(1, std::min(number, size) - 1);
      chosen.insert(from[static_cast<std::size_t>(i * (size - 1) / last)]);
    }
  };
  spread(edges, count / 2);
  std::vector<std::int64_t> rest;
  std::set_difference(all.begin(), all.end(), chosen.begin(), chosen.end(),
                      std::back_inserter(rest));
  spread(rest, count - static_cast<std::int64_t>(chosen.size()));
  return {chosen.begin(), chosen.end()};
}

double RowMaps::visible_pairs() const {
  return std::accumulate(
      visible_keys.begin(), visible_keys.end(), 0.0,
      [](double sum, std::int64_t keys) { return sum + static_cast<double>(keys); });
}

RowMaps make_row_maps(const SequenceBatch& batch, const CpConfig& config) {
  Shard whole = make_sharding(batch, config, 1).shards[0];
  RowMaps maps;
  maps.q = make_row_map(std::move(whole.q), batch.q_rows);
  maps.kv = make_row_map(std::move(whole.kv), batch.kv_rows);
  maps.visible_keys.assign(static_cast<std::size_t>(batch.q_rows), 0);
  for (const OwnedChunk& chunk : maps.q.chunks) {
    const Document& document = batch.documents[static_cast<std::size_t>(chunk.document)];
    for (std::int64_t token = 0; token < chunk.num_tokens; ++token) {
      maps.visible_keys[static_cast<std::size_t>(chunk.row_begin + token)] =
          visible_pairs(document, config.mask, chunk.first + token, 1);
    }
  }
  return maps;
}

Reference make_reference(const ReferenceRequest& request) {
  const RowMaps& maps = request.maps;
  const RunConfig& config = request.config;
  const Problem problem = problem_of(config, request.lane, request.source.info());
  const AttentionShape& shape = problem.shape;
  const Flop flop = flop_of(shape, maps.visible_pairs(), has_gradients(config));
  const double budget = kReferenceFlopBudget / request.num_references;

  Reference exact;
  exact.q.rows = choose_reference_rows(maps.q.chunks, flop.q, budget, config.reference_rows);
  const bool knows_all_rows =
      exact.q.rows.size() == maps.q.rows.size() || request.single_rank != nullptr;
  if (has_gradients(config) && knows_all_rows) {
    exact.kv.rows = choose_reference_rows(maps.kv.chunks, flop.kv, budget, config.reference_rows);
  }
  set_chunks(exact.q, maps.q);
  set_chunks(exact.kv, maps.kv);
  const GlobalInputs inputs =
      read_inputs(request, problem, exact.kv.rows.empty() ? exact.q.rows : maps.q.rows);
  if (!exact.q.rows.empty()) {  // to the reference an empty list means all rows
    const reference::AttentionArgs args{.shape = shape,
                                        .batch = problem.batch,
                                        .mask = request.lane.mask,
                                        .q = inputs.q.view,
                                        .k = inputs.k.view,
                                        .v = inputs.v.view,
                                        .rows = exact.q.rows,
                                        .num_threads = request.threads};
    reference::AttentionResult result = reference::attention(args);
    exact.out = std::move(result.out);
    exact.lse = std::move(result.lse);
    exact.logit_size = std::move(result.logit_size);
    exact.part_size = std::move(result.part_size);
    exact.term_size = std::move(result.term_size);
  }
  exact.groups = bounded_groups(exact, maps.q.chunks.size(), shape.num_heads);
  if (!has_gradients(config)) return exact;
  const reference::GradientArgs args{.shape = shape,
                                     .batch = problem.batch,
                                     .mask = request.lane.mask,
                                     .q = inputs.q.view,
                                     .k = inputs.k.view,
                                     .v = inputs.v.view,
                                     .dout = inputs.dout.view,
                                     .dlse = inputs.dlse.view,
                                     .num_threads = request.threads};
  exact.gradient = reference::gradient_of_rows(args, statistics_of(request, args, exact),
                                               exact.q.rows, exact.kv.rows);
  return exact;
}

}  // namespace cpattn
