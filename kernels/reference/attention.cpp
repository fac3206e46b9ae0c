#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/deal.h"
#include "kernels/reference/visibility.h"
#include "src/base/error.h"

namespace cpattn::reference {
namespace {

/// A head of k or v with the norms of its rows.
struct Rows {
  HeadMatrix values;
  std::vector<double> norms;

  Rows(const Tensor& tensor, std::int64_t head) : values(tensor, head) {
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
      norms.push_back(std::sqrt(dot(values.row(i), values.row(i), values.dim())));
    }
  }
  double norm(std::int64_t i) const { return norms[static_cast<std::size_t>(i)]; }
};

/// Where the results of one row go; all but lse start as zeros.
struct RowResult {
  double* out;
  double& lse;
  double& logit_size;
  double& part_size;
  double& term_size;
};

/// Results of one row over its visible keys, at least one.
void attend_row(const std::vector<double>& q, double scale, const Rows& keys, const Rows& rows,
                std::int64_t first_key, std::int64_t visible, const RowResult& result) {
  const HeadMatrix& k = keys.values;
  const HeadMatrix& v = rows.values;
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
    const double term = weight * rows.norm(first_key + j);
    result.logit_size += weight * std::abs(logit);
    result.part_size += weight * keys.norm(first_key + j);
    result.term_size += term * term;
    add_scaled(weight, v.row(first_key + j), v.dim(), result.out);
  }
  for (std::size_t d = 0; d < v.dim(); ++d) result.out[d] /= sum;
  result.lse = max + std::log(sum);
  result.logit_size /= sum;
  const double q_size = std::sqrt(dot(q.data(), q.data(), k.dim()) / static_cast<double>(k.dim()));
  result.part_size *= std::abs(scale) * q_size / sum;
  result.term_size = std::sqrt(result.term_size) / sum;
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
  for (std::vector<double>* sizes : {&result.logit_size, &result.part_size, &result.term_size}) {
    sizes->assign(num_rows * num_heads, 0.0);
  }
  result.lse.assign(num_rows * num_heads, -std::numeric_limits<double>::infinity());

  const DocumentFinder finder(args.batch, Side::q);
  for (std::int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const Rows k(args.k, kv_head);
    const Rows v(args.v, kv_head);
    const std::int64_t first_head = kv_head * shape.group_size();
    deal(num_rows, args.num_threads, [&](std::size_t i) {
      const std::int64_t row = args.rows.empty() ? static_cast<std::int64_t>(i) : args.rows[i];
      const Document* document = finder.find(row);
      if (document == nullptr) return;
      const std::int64_t visible = count_visible(*document, args.mask, row - document->q_begin);
      if (visible == 0) return;
      std::vector<double> q(k.values.dim());
      for (std::int64_t head = first_head; head < first_head + shape.group_size(); ++head) {
        const std::size_t place = i * num_heads + static_cast<std::size_t>(head);
        args.q.read(row, head, q.data());
        attend_row(q, shape.softmax_scale, k, v, document->kv_begin, visible,
                   {&result.out[place * value_dim], result.lse[place], result.logit_size[place],
                    result.part_size[place], result.term_size[place]});
      }
    });
  }
  return result;
}

}  // namespace cpattn::reference
