#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/deal.h"
#include "kernels/reference/visibility.h"
#include "src/base/error.h"

namespace cpattn::reference {
namespace {

/// Results of one row over its visible keys, at least one; `out` and `logit_size` start as zeros.
void attend_row(const std::vector<double>& q, double scale, const HeadMatrix& k,
                const HeadMatrix& v, std::int64_t first_key, std::int64_t visible, double* out,
                double* lse, double* logit_size) {
  // First pass: logits and their maximum.
  std::vector<double> logits(static_cast<std::size_t>(visible));
  double max = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = 0; j < visible; ++j) {
    double& logit = logits[static_cast<std::size_t>(j)];
    logit = scale * dot(q.data(), k.row(first_key + j), k.dim());
    max = std::max(max, logit);
  }
  // Second pass: weights and values.
  double sum = 0.0;
  for (std::int64_t j = 0; j < visible; ++j) {
    const double logit = logits[static_cast<std::size_t>(j)];
    const double weight = std::exp(logit - max);
    sum += weight;
    *logit_size += weight * std::abs(logit);
    add_scaled(weight, v.row(first_key + j), v.dim(), out);
  }
  for (std::size_t d = 0; d < v.dim(); ++d) out[d] /= sum;
  *lse = max + std::log(sum);
  *logit_size /= sum;
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
  const auto num_heads = static_cast<std::size_t>(shape.num_heads);
  const auto value_dim = static_cast<std::size_t>(shape.value_dim);
  AttentionResult result;
  result.out.assign(num_rows * num_heads * value_dim, 0.0);
  result.logit_size.assign(num_rows * num_heads, 0.0);
  result.lse.assign(num_rows * num_heads, -std::numeric_limits<double>::infinity());

  const DocumentFinder finder(args.batch, Side::q);
  for (std::int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const HeadMatrix k(args.k, kv_head);
    const HeadMatrix v(args.v, kv_head);
    const std::int64_t first_head = kv_head * shape.group_size();
    deal(num_rows, args.num_threads, [&](std::size_t i) {
      const std::int64_t row = args.rows.empty() ? static_cast<std::int64_t>(i) : args.rows[i];
      const Document* document = finder.find(row);
      if (document == nullptr) return;
      const std::int64_t visible = count_visible(*document, args.mask, row - document->q_begin);
      if (visible == 0) return;
      std::vector<double> q(k.dim());
      for (std::int64_t head = first_head; head < first_head + shape.group_size(); ++head) {
        const std::size_t place = i * num_heads + static_cast<std::size_t>(head);
        args.q.read(row, head, q.data());
        attend_row(q, shape.softmax_scale, k, v, document->kv_begin, visible,
                   &result.out[place * value_dim], &result.lse[place], &result.logit_size[place]);
      }
    });
  }
  return result;
}

}  // namespace cpattn::reference
