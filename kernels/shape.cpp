#include "kernels/shape.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "src/base/error.h"

namespace cpattn {
namespace {

using Lengths = std::vector<std::int64_t>;

/// Throws for the first entry that breaks: starts at 0, never decreases, ends within `rows`.
void require_cumulative(std::string_view name, const Lengths& cu, std::int64_t rows) {
  require(rows >= 0, name, ": the tensor has ", rows, " rows, expected at least 0");
  require(!cu.empty(), name, " is empty, expected number of documents + 1 entries");
  require(cu[0] == 0, name, "[0] is ", cu[0], ", expected 0");
  for (std::size_t i = 1; i < cu.size(); ++i) {
    require(cu[i] >= cu[i - 1], name, "[", i, "] is ", cu[i], ", expected at least ", name, "[",
            i - 1, "] = ", cu[i - 1]);
    require(cu[i] <= rows, name, "[", i, "] is ", cu[i], ", expected at most the ", rows,
            " rows of the tensor");
  }
}

/// One side (q or kv) of a document, with the document's index for messages.
struct Extent {
  std::int64_t begin;
  std::int64_t tokens;
  std::size_t document;
};

void require_disjoint(std::string_view side, std::vector<Extent> extents, std::int64_t rows) {
  require(rows >= 0, side, "_rows is ", rows, ", expected at least 0");
  for (const Extent& extent : extents) {
    require(extent.tokens >= 0, "documents[", extent.document, "].", side, "_tokens is ",
            extent.tokens, ", expected at least 0");
    // Written as two comparisons because begin + tokens may not fit.
    require(extent.begin >= 0 && extent.begin <= rows && extent.tokens <= rows - extent.begin,
            "documents[", extent.document, "] has ", side, "_begin ", extent.begin, " and ", side,
            "_tokens ", extent.tokens, ", expected to lie within ", side, "_rows ", rows);
  }
  std::erase_if(extents, [](const Extent& extent) { return extent.tokens == 0; });
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < extents.size(); ++i) {
    const Extent& before = extents[i - 1];
    require(before.begin + before.tokens <= extents[i].begin, "documents[", before.document,
            "] and documents[", extents[i].document, "] overlap at ", side, " row ",
            extents[i].begin, ", expected disjoint documents");
  }
}

}  // namespace

SequenceBatch batch_from_cu_seqlens(const Lengths& cu_seqlens_q, const Lengths& cu_seqlens_kv,
                                    std::int64_t q_rows, std::int64_t kv_rows) {
  require_cumulative("cu_seqlens_q", cu_seqlens_q, q_rows);
  require_cumulative("cu_seqlens_kv", cu_seqlens_kv, kv_rows);
  require(cu_seqlens_q.size() == cu_seqlens_kv.size(), "cu_seqlens_kv has ", cu_seqlens_kv.size(),
          " entries, expected ", cu_seqlens_q.size(), " as cu_seqlens_q has");
  SequenceBatch batch{.documents = {}, .q_rows = q_rows, .kv_rows = kv_rows};
  batch.documents.reserve(cu_seqlens_q.size() - 1);
  for (std::size_t d = 0; d + 1 < cu_seqlens_q.size(); ++d) {
    batch.documents.push_back({.q_begin = cu_seqlens_q[d],
                               .q_tokens = cu_seqlens_q[d + 1] - cu_seqlens_q[d],
                               .kv_begin = cu_seqlens_kv[d],
                               .kv_tokens = cu_seqlens_kv[d + 1] - cu_seqlens_kv[d]});
  }
  return batch;
}

SequenceBatch batch_from_padded(const Lengths& cu_seqlens_padded, const Lengths& lengths,
                                std::int64_t rows) {
  require_cumulative("cu_seqlens_padded", cu_seqlens_padded, rows);
  require(lengths.size() + 1 == cu_seqlens_padded.size(), "lengths has ", lengths.size(),
          " entries, expected ", cu_seqlens_padded.size() - 1, ", one for each slot of ",
          "cu_seqlens_padded");
  SequenceBatch batch{.documents = {}, .q_rows = rows, .kv_rows = rows};
  batch.documents.reserve(lengths.size());
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    const std::int64_t begin = cu_seqlens_padded[d];
    const std::int64_t slot = cu_seqlens_padded[d + 1] - begin;
    require(lengths[d] >= 0 && lengths[d] <= slot, "lengths[", d, "] is ", lengths[d],
            ", expected 0 to ", slot, ", the size of slot ", d, " of cu_seqlens_padded");
    batch.documents.push_back({begin, lengths[d], begin, lengths[d]});
  }
  return batch;
}

SequenceBatch batch_of_one(std::int64_t q_tokens, std::int64_t kv_tokens) {
  return {.documents = {{0, q_tokens, 0, kv_tokens}}, .q_rows = q_tokens, .kv_rows = kv_tokens};
}

void validate(const SequenceBatch& batch) {
  std::vector<Extent> q, kv;
  q.reserve(batch.documents.size());
  kv.reserve(batch.documents.size());
  for (std::size_t d = 0; d < batch.documents.size(); ++d) {
    const Document& document = batch.documents[d];
    q.push_back({document.q_begin, document.q_tokens, d});
    kv.push_back({document.kv_begin, document.kv_tokens, d});
  }
  require_disjoint("q", std::move(q), batch.q_rows);
  require_disjoint("kv", std::move(kv), batch.kv_rows);
}

void validate(const AttentionShape& shape) {
  std::string problems;
  const auto check = [&problems](bool is_met, const auto&... parts) {
    if (!is_met) problems += (problems.empty() ? "" : "; ") + detail::concat(parts...);
  };
  check(shape.num_heads >= 1, "num_heads is ", shape.num_heads, ", expected at least 1");
  check(shape.num_kv_heads >= 1, "num_kv_heads is ", shape.num_kv_heads, ", expected at least 1");
  if (shape.num_heads >= 1 && shape.num_kv_heads >= 1) {
    check(shape.num_heads % shape.num_kv_heads == 0, "num_heads is ", shape.num_heads,
          ", expected a multiple of num_kv_heads = ", shape.num_kv_heads);
  }
  check(shape.head_dim >= 1 && shape.head_dim <= kMaxHeadDim, "head_dim is ", shape.head_dim,
        ", expected 1 to ", kMaxHeadDim);
  check(shape.value_dim >= 1 && shape.value_dim <= kMaxHeadDim, "value_dim is ", shape.value_dim,
        ", expected 1 to ", kMaxHeadDim);
  // The kernels hold scale * log2(e) in f32, so it has to be finite there too.
  check(std::isfinite(static_cast<float>(shape.softmax_scale * 1.5)), "softmax_scale is ",
        shape.softmax_scale, ", expected a finite f32 value");
  require(problems.empty(), problems);
}

}  // namespace cpattn
