#include "kernels/reference/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <string_view>
#include <thread>

#include "src/base/dtype.h"
#include "src/base/error.h"

namespace cpattn::reference {
namespace {

void require_tensor(std::string_view name, const AnyConstTensor& tensor,
                    const std::array<std::int64_t, 3>& shape) {
  require(tensor.shape == shape, name, " is [", tensor.shape[0], ", ", tensor.shape[1], ", ",
          tensor.shape[2], "], expected [", shape[0], ", ", shape[1], ", ", shape[2], "]");
  require(tensor.strides[2] == 1, name, " has stride ", tensor.strides[2],
          " in its last dimension, expected 1");
  require(tensor.data != nullptr || shape[0] == 0, name, " has no data, expected ", shape[0],
          " rows");
}

/// Calls visit(const T*) with the elements of (token, head) under their own type.
template <class Visitor>
void visit_row(const AnyConstTensor& tensor, std::int64_t token, std::int64_t head,
               Visitor&& visit) {
  const std::byte* row = tensor.row(token, head);
  switch (tensor.dtype) {
    case DType::f32:
      return visit(reinterpret_cast<const float*>(row));
    case DType::f16:
      return visit(reinterpret_cast<const f16*>(row));
    case DType::bf16:
      return visit(reinterpret_cast<const bf16*>(row));
  }
}

/// The document a q row belongs to, found by bisection; documents are disjoint in q.
class RowFinder {
 public:
  explicit RowFinder(const SequenceBatch& batch) {
    for (const Document& document : batch.documents) {
      if (document.q_tokens > 0) documents_.push_back(document);
    }
    std::sort(documents_.begin(), documents_.end(),
              [](const Document& a, const Document& b) { return a.q_begin < b.q_begin; });
  }

  /// nullptr for a padding row.
  const Document* find(std::int64_t row) const {
    auto after = std::upper_bound(
        documents_.begin(), documents_.end(), row,
        [](std::int64_t value, const Document& document) { return value < document.q_begin; });
    if (after == documents_.begin()) return nullptr;
    const Document& document = *--after;
    return row < document.q_begin + document.q_tokens ? &document : nullptr;
  }

 private:
  std::vector<Document> documents_;
};

struct Scratch {
  std::vector<double> q;
  std::vector<double> weights;  ///< logits, then exp(logit - max)
};

/// First pass: scaled logits of the first `visible` keys of the document, and their maximum.
double compute_logits(const AttentionArgs& args, const Document& document, std::int64_t kv_head,
                      std::int64_t visible, Scratch& scratch) {
  const std::int64_t head_dim = args.shape.head_dim;
  double max = -std::numeric_limits<double>::infinity();
  scratch.weights.resize(static_cast<std::size_t>(visible));
  for (std::int64_t j = 0; j < visible; ++j) {
    // Four running sums only hide the latency of the addition.
    std::array<double, 4> sums{};
    visit_row(args.k, document.kv_begin + j, kv_head, [&](const auto* k) {
      for (std::int64_t d = 0; d < head_dim; ++d)
        sums[static_cast<std::size_t>(d % 4)] +=
            scratch.q[static_cast<std::size_t>(d)] * static_cast<double>(to_float(k[d]));
    });
    const double logit = args.shape.softmax_scale * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    scratch.weights[static_cast<std::size_t>(j)] = logit;
    max = std::max(max, logit);
  }
  return max;
}

/// Second pass: out and lse of one (row, head) over the first `visible` keys, at least one.
void attend_row(const AttentionArgs& args, const Document& document, std::int64_t row,
                std::int64_t head, std::int64_t visible, Scratch& scratch, double* out,
                double* lse) {
  const std::int64_t kv_head = head / args.shape.group_size();
  scratch.q.resize(static_cast<std::size_t>(args.shape.head_dim));
  visit_row(args.q, row, head, [&](const auto* q) {
    for (std::size_t d = 0; d < scratch.q.size(); ++d)
      scratch.q[d] = static_cast<double>(to_float(q[d]));
  });
  const double max = compute_logits(args, document, kv_head, visible, scratch);
  double sum = 0.0;
  for (std::int64_t j = 0; j < visible; ++j) {
    const double weight = std::exp(scratch.weights[static_cast<std::size_t>(j)] - max);
    sum += weight;
    visit_row(args.v, document.kv_begin + j, kv_head, [&](const auto* v) {
      for (std::int64_t d = 0; d < args.shape.value_dim; ++d)
        out[d] += weight * static_cast<double>(to_float(v[d]));
    });
  }
  for (std::int64_t d = 0; d < args.shape.value_dim; ++d) out[d] /= sum;
  *lse = max + std::log(sum);
}

/// Keys that the q row at `position` of its document sees: a prefix of the document's keys.
std::int64_t count_visible(const Document& document, MaskKind mask, std::int64_t position) {
  switch (mask) {
    case MaskKind::full:
      return document.kv_tokens;
    case MaskKind::causal:  // j <= position + (kv_tokens - q_tokens)
      return std::max<std::int64_t>(0, position + 1 + document.kv_tokens - document.q_tokens);
  }
  return 0;
}

/// Rows first, first + stride, ... of the request.
void attend_rows(const AttentionArgs& args, const RowFinder& finder, std::size_t first,
                 std::size_t stride, std::size_t num_rows, AttentionResult& result) {
  const auto num_heads = static_cast<std::size_t>(args.shape.num_heads);
  const auto value_dim = static_cast<std::size_t>(args.shape.value_dim);
  Scratch scratch;
  for (std::size_t i = first; i < num_rows; i += stride) {
    const std::int64_t row = args.rows.empty() ? static_cast<std::int64_t>(i) : args.rows[i];
    const Document* document = finder.find(row);
    if (document == nullptr) continue;
    const std::int64_t visible = count_visible(*document, args.mask, row - document->q_begin);
    if (visible == 0) continue;
    for (std::size_t head = 0; head < num_heads; ++head) {
      const std::size_t place = i * num_heads + head;
      attend_row(args, *document, row, static_cast<std::int64_t>(head), visible, scratch,
                 &result.out[place * value_dim], &result.lse[place]);
    }
  }
}

}  // namespace

AttentionResult attention(const AttentionArgs& args) {
  validate(args.shape);
  validate(args.batch);
  const AttentionShape& shape = args.shape;
  require_tensor("q", args.q, {args.batch.q_rows, shape.num_heads, shape.head_dim});
  require_tensor("k", args.k, {args.batch.kv_rows, shape.num_kv_heads, shape.head_dim});
  require_tensor("v", args.v, {args.batch.kv_rows, shape.num_kv_heads, shape.value_dim});
  require(args.num_threads >= 1, "num_threads is ", args.num_threads, ", expected at least 1");
  for (std::size_t i = 0; i < args.rows.size(); ++i) {
    require(args.rows[i] >= 0 && args.rows[i] < args.batch.q_rows, "rows[", i, "] is ",
            args.rows[i], ", expected 0 to ", args.batch.q_rows - 1);
  }

  const std::size_t num_rows =
      args.rows.empty() ? static_cast<std::size_t>(args.batch.q_rows) : args.rows.size();
  const std::size_t num_states = num_rows * static_cast<std::size_t>(shape.num_heads);
  AttentionResult result;
  result.out.assign(num_states * static_cast<std::size_t>(shape.value_dim), 0.0);
  result.lse.assign(num_states, -std::numeric_limits<double>::infinity());

  // Every thread takes each n-th row: under a causal mask that shares the work evenly.
  const RowFinder finder(args.batch);
  const auto num_threads = static_cast<std::size_t>(args.num_threads);
  std::vector<std::exception_ptr> failures(num_threads);
  std::vector<std::jthread> threads;
  const auto work = [&](std::size_t thread) {
    try {
      attend_rows(args, finder, thread, num_threads, num_rows, result);
    } catch (...) {
      failures[thread] = std::current_exception();
    }
  };
  for (std::size_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(work, thread);
  work(0);
  for (std::jthread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return result;
}

}  // namespace cpattn::reference
