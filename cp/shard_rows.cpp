#include "cp/shard_rows.h"

#include <algorithm>
#include <span>
#include <string>

#include "cp/shard_tools.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

enum class Way { gather, scatter };

Buffer ranges_on(Device& device, const std::vector<OwnedChunk>& chunks, Way way) {
  std::vector<RowRange> ranges;
  for (const OwnedChunk& chunk : chunks) {
    const std::int64_t whole = chunk.row_begin, local = chunk.local_begin;
    ranges.push_back(way == Way::gather ? RowRange{whole, local, local}
                                        : RowRange{local, whole, local});
  }
  const std::span<const std::byte> bytes = std::as_bytes(std::span(ranges));
  Buffer there = device.allocate(bytes.size());
  device.upload(there.data(), bytes);
  return there;
}

/// Whether a row is one run of bytes.
bool has_whole_rows(const AnyConstTensor& tensor) {
  return tensor.shape[1] <= 1 || tensor.strides[1] == tensor.shape[2];
}

}  // namespace

ShardRows::ShardRows(const std::vector<OwnedChunk>& chunks, const KernelTable& kernels,
                     Device& device)
    : chunks_(chunks),
      kernels_(kernels),
      device_(device),
      gather_(ranges_on(device, chunks, Way::gather)),
      scatter_(ranges_on(device, chunks, Way::scatter)) {
  require(kernels.device == device.kind(), "kernels ", kernels.name, " for ",
          name_of(kernels.device), ", expected kernels for ", device.description());
}

void ShardRows::shard(const AnyConstTensor& global, const AnyTensor& local, Stream stream) const {
  refuse_misfits(global, local, stream);
  copy(global, local, gather_, stream);
}

void ShardRows::unshard(const AnyConstTensor& local, const AnyTensor& global, Stream stream) const {
  refuse_misfits(global, local, stream);
  copy(local, global, scatter_, stream);
}

void ShardRows::refuse_misfits(const AnyConstTensor& global, const AnyConstTensor& local,
                               Stream stream) const {
  std::string text = rows_misfit(global, local, chunks_);
  const auto add = [&text](std::string_view name, const std::string& problem) {
    if (!problem.empty()) text += detail::concat(text.empty() ? "" : "; ", name, problem);
  };
  if (num_rows(chunks_) > 0) {
    add("global: ", device_.problem_with(global.data));
    add("local: ", device_.problem_with(local.data));
  }
  add("", device_.problem_with(stream));
  require(text.empty(), text);
}

void ShardRows::copy(const AnyConstTensor& from, const AnyTensor& to, const Buffer& ranges,
                     Stream stream) const {
  if (num_rows(chunks_) == 0) return;
  const CurrentDevice current(device_);
  const auto element = static_cast<std::int64_t>(size_of(from.dtype));
  const bool is_whole = has_whole_rows(from) && has_whole_rows(to);
  const std::int64_t heads = from.shape[1],
                     runs = is_whole ? std::min<std::int64_t>(heads, 1) : heads;
  const auto row_bytes = [element](const auto& tensor) { return tensor.strides[0] * element; };
  const auto at = [element](const auto& tensor, auto* data, std::int64_t head) {
    return data + head * tensor.strides[1] * element;
  };
  for (std::int64_t head = 0; head < runs; ++head) {
    kernels_.copy_rows({.from = at(from, static_cast<const std::byte*>(from.data), head),
                        .from_stride_bytes = row_bytes(from),
                        .to = at(to, static_cast<std::byte*>(to.data), head),
                        .to_stride_bytes = row_bytes(to),
                        .row_bytes = (is_whole ? heads : 1) * from.shape[2] * element,
                        .ranges = ranges.as<RowRange>(),
                        .num_ranges = static_cast<std::int64_t>(chunks_.size()),
                        .num_rows = num_rows(chunks_),
                        .stream = stream});
  }
}

}  // namespace cpattn
