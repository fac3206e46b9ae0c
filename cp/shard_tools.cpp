#include "cp/shard_tools.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cp/shard_rows.h"

namespace cpattn {
namespace {

/// Rows a global tensor must have for these chunks to be in it.
std::int64_t rows_spanned(const std::vector<OwnedChunk>& chunks) {
  std::int64_t rows = 0;
  for (const OwnedChunk& chunk : chunks) rows = std::max(rows, chunk.row_begin + chunk.num_tokens);
  return rows;
}

/// The same of tensors that the host copies.
std::string host_misfit(const AnyConstTensor& global, const AnyConstTensor& local,
                        const std::vector<OwnedChunk>& chunks) {
  std::string text = rows_misfit(global, local, chunks);
  const CpuDevice host;
  for (const auto* tensor : {&global, &local}) {
    const std::string place = host.problem_with(tensor->data);
    if (place.empty()) continue;
    const char* name = tensor == &global ? "global: " : "local: ";
    text += detail::concat(text.empty() ? "" : "; ", name, place);
  }
  return text;
}

const Document& document_of(const SequenceBatch& batch, const OwnedChunk& chunk) {
  const auto document = static_cast<std::size_t>(chunk.document);
  require(document < batch.documents.size(), "a chunk of document ", chunk.document,
          ": expected one of ", batch.documents.size());
  return batch.documents[document];
}

std::size_t bytes_of_row(const AnyConstTensor& tensor) {
  return static_cast<std::size_t>(tensor.shape[2]) * size_of(tensor.dtype);
}

}  // namespace

std::int64_t num_rows(const std::vector<OwnedChunk>& chunks) {
  return chunks.empty() ? 0 : chunks.back().local_begin + chunks.back().num_tokens;
}

std::string rows_misfit(const AnyConstTensor& global, const AnyConstTensor& local,
                        const std::vector<OwnedChunk>& chunks) {
  std::string text;
  const auto add = [&text](const auto&... parts) {
    text += detail::concat(text.empty() ? "" : "; ", parts...);
  };
  const std::int64_t needed = rows_spanned(chunks);
  if (global.shape[0] < needed)
    add("global: ", global.shape[0], " rows, expected at least ", needed);
  if (local.shape[0] != num_rows(chunks))
    add("local: ", local.shape[0], " rows, expected ", num_rows(chunks));
  if (local.dtype != global.dtype)
    add("local: ", name_of(local.dtype), ", but global is ", name_of(global.dtype));
  for (const int axis : {1, 2}) {
    if (local.shape[axis] != global.shape[axis])
      add("local: dimension ", axis, " is ", local.shape[axis], ", but that of global is ",
          global.shape[axis]);
  }
  for (const auto* tensor : {&global, &local}) {
    const char* name = tensor == &global ? "global" : "local";
    if (!tensor->has_contiguous_rows())
      add(name, ": last stride ", tensor->strides[2], ", expected 1");
    if (tensor->data == nullptr && num_rows(chunks) > 0) add(name, ": null");
  }
  return text;
}

void shard_rows(const AnyConstTensor& global, const std::vector<OwnedChunk>& chunks,
                const AnyTensor& local) {
  CpuDevice host;
  ShardRows(chunks, default_kernels(), host).shard(global, local);
}

void unshard_rows(const AnyConstTensor& local, const std::vector<OwnedChunk>& chunks,
                  const AnyTensor& global) {
  CpuDevice host;
  ShardRows(chunks, default_kernels(), host).unshard(local, global);
}

constexpr std::string_view kGatherCheck = "all_gather_rows check";

void refuse_all_gather_rows(Communicator& comm, std::string_view why, Clock::time_point deadline) {
  refuse_together(comm, why.empty() ? "refused" : why, deadline, kGatherCheck);
}

void all_gather_rows(Communicator& comm, const Sharding& sharding, ShardSide side,
                     const AnyConstTensor& local, const AnyTensor& global,
                     Clock::time_point deadline) {
  const auto chunks_of = [&](std::size_t rank) -> const std::vector<OwnedChunk>& {
    return side == ShardSide::q ? sharding.shards[rank].q : sharding.shards[rank].kv;
  };
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto me = static_cast<std::size_t>(comm.rank());
  std::string problem;
  if (sharding.shards.size() != ranks) {
    problem =
        detail::concat("a sharding over ", sharding.shards.size(), " ranks, expected ", ranks);
  } else {
    problem = host_misfit(global, local, chunks_of(me));
    std::int64_t needed = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      needed = std::max(needed, rows_spanned(chunks_of(rank)));
    if (problem.empty() && (global.shape[0] < needed || (global.data == nullptr && needed > 0)))
      problem = detail::concat("global: ", global.shape[0], " rows",
                               global.data == nullptr ? ", null" : "", "; expected ", needed);
  }
  refuse_together(comm, problem, deadline, kGatherCheck);
  // Everybody cuts everybody's rows out of what arrives: by one sharding.
  agree(comm,
        detail::concat("side=", side == ShardSide::q ? "q" : "kv", "\ndtype=", name_of(local.dtype),
                       "\ndimension 1=", local.shape[1], "\ndimension 2=", local.shape[2],
                       "\nsharding_digest=", digest_of(sharding), '\n'),
        deadline);

  const std::array<std::int64_t, 3> shape = local.shape;
  const std::size_t row_bytes = bytes_of_row(local);
  std::vector<std::byte> mine(static_cast<std::size_t>(shape[0] * shape[1]) * row_bytes);
  const AnyTensor packed = contiguous_tensor(static_cast<void*>(mine.data()), local.dtype, shape);
  for (std::int64_t row = 0; row < shape[0]; ++row) {
    for (std::int64_t head = 0; head < shape[1]; ++head)
      std::memcpy(packed.row(row, head), local.row(row, head), row_bytes);
  }
  const auto all = comm.all_gather(mine, deadline, "all_gather_rows");
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const void* rows = all[rank].data();
    unshard_rows(
        contiguous_tensor(rows, local.dtype, {num_rows(chunks_of(rank)), shape[1], shape[2]}),
        chunks_of(rank), global);
  }
}

std::vector<std::int64_t> positions(const std::vector<OwnedChunk>& chunks) {
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(num_rows(chunks)));
  for (const OwnedChunk& chunk : chunks) {
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) result.push_back(chunk.first + i);
  }
  return result;
}

std::vector<std::int64_t> query_positions(const SequenceBatch& batch,
                                          const std::vector<OwnedChunk>& q_chunks) {
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(num_rows(q_chunks)));
  for (const OwnedChunk& chunk : q_chunks) {
    const Document& document = document_of(batch, chunk);
    const std::int64_t first = chunk.first + document.kv_tokens - document.q_tokens;
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) result.push_back(first + i);
  }
  return result;
}

std::vector<std::int64_t> local_cu_seqlens(std::int64_t num_documents,
                                           const std::vector<OwnedChunk>& chunks) {
  std::vector<std::int64_t> cu_seqlens(static_cast<std::size_t>(num_documents) + 1, 0);
  for (const OwnedChunk& chunk : chunks) {
    require(chunk.document < num_documents, "a chunk of document ", chunk.document,
            ": expected one of ", num_documents);
    cu_seqlens[static_cast<std::size_t>(chunk.document) + 1] += chunk.num_tokens;
  }
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) cu_seqlens[i] += cu_seqlens[i - 1];
  return cu_seqlens;
}

std::vector<std::int64_t> next_token_targets(std::span<const std::int64_t> tokens,
                                             const SequenceBatch& batch,
                                             const std::vector<OwnedChunk>& q_chunks,
                                             std::int64_t ignore) {
  require(static_cast<std::int64_t>(tokens.size()) == batch.q_rows, "tokens: ", tokens.size(),
          ", expected ", batch.q_rows, ", one per global q row");
  std::vector<std::int64_t> targets;
  targets.reserve(static_cast<std::size_t>(num_rows(q_chunks)));
  for (const OwnedChunk& chunk : q_chunks) {
    const Document& document = document_of(batch, chunk);
    const std::int64_t last = document.q_begin + document.q_tokens - 1;
    for (std::int64_t i = 0; i < chunk.num_tokens; ++i) {
      const std::int64_t row = chunk.row_begin + i;
      targets.push_back(row < last ? tokens[static_cast<std::size_t>(row) + 1] : ignore);
    }
  }
  return targets;
}

namespace {

/// Number of the first leaf of every document, and the number of all leaves at the end.
std::vector<std::int64_t> first_leaves(const SequenceBatch& batch, const CpConfig& config,
                                       int world_size) {
  check_divisible(batch, config, world_size);
  std::vector<std::int64_t> first{0};
  for (const Document& document : batch.documents)
    first.push_back(first.back() + chunk_grid(document.q_tokens, config, world_size).num_chunks());
  return first;
}

}  // namespace

std::vector<LeafRows> leaf_rows(const SequenceBatch& batch, const CpConfig& config, int world_size,
                                const std::vector<OwnedChunk>& q_chunks) {
  const std::vector<std::int64_t> first = first_leaves(batch, config, world_size);
  std::vector<LeafRows> leaves;
  leaves.reserve(q_chunks.size());
  for (const OwnedChunk& chunk : q_chunks) {
    document_of(batch, chunk);  // it is there
    leaves.push_back({first[static_cast<std::size_t>(chunk.document)] + chunk.chunk,
                      chunk.local_begin, chunk.num_tokens});
  }
  return leaves;
}

std::int64_t num_leaves(const SequenceBatch& batch, const CpConfig& config, int world_size) {
  return first_leaves(batch, config, world_size).back();
}

}  // namespace cpattn
