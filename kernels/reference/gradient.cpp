#include "kernels/reference/gradient.h"

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "kernels/reference/attention.h"
#include "kernels/reference/deal.h"
#include "kernels/reference/visibility.h"
#include "src/base/error.h"

namespace cpattn::reference {
namespace {

void check(const GradientArgs& args) {
  validate(args.shape);
  validate(args.batch);
  const AttentionShape& shape = args.shape;
  const std::int64_t q_rows = args.batch.q_rows;
  const std::int64_t kv_rows = args.batch.kv_rows;
  require_tensor("q", args.q, {q_rows, shape.num_heads, shape.head_dim});
  require_tensor("k", args.k, {kv_rows, shape.num_kv_heads, shape.head_dim});
  require_tensor("v", args.v, {kv_rows, shape.num_kv_heads, shape.value_dim});
  require_tensor("dout", args.dout, {q_rows, shape.num_heads, shape.value_dim});
  if (args.dlse.data != nullptr) require_tensor("dlse", args.dlse, {q_rows, shape.num_heads, 1});
  require(args.num_threads >= 1, "num_threads is ", args.num_threads, ", expected at least 1");
}

void check_rows(std::string_view name, std::span<const std::int64_t> rows, std::int64_t limit) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    require(rows[i] >= 0 && rows[i] < limit, name, "[", i, "] is ", rows[i], ", expected 0 to ",
            limit - 1);
  }
}

double square(double x) { return x * x; }

std::vector<double> squared_norms(const HeadMatrix& matrix, std::int64_t rows) {
  std::vector<double> squares;
  for (std::int64_t i = 0; i < rows; ++i) {
    squares.push_back(dot(matrix.row(i), matrix.row(i), matrix.dim()));
  }
  return squares;
}

/// A head of a tensor with the squared norms of its rows.
struct Rows {
  HeadMatrix values;
  std::vector<double> squares;

  Rows(const Tensor& tensor, std::int64_t head)
      : values(tensor, head), squares(squared_norms(values, tensor.shape[0])) {}
  const double* row(std::int64_t i) const { return values.row(i); }
  double square(std::int64_t i) const { return squares[static_cast<std::size_t>(i)]; }
};

/// Sums of squares, until the end; `underflow` is one of sizes.
void accumulate(Sensitivity& sums, const Sensitivity& terms) {
  sums.weight += terms.weight;
  sums.logit += terms.logit;
  sums.lse += terms.lse;
  sums.product += terms.product;
  sums.delta += terms.delta;
  sums.underflow += terms.underflow;
}

void take_roots(std::vector<Sensitivity>& sums) {
  for (Sensitivity& sum : sums) {
    sum = {std::sqrt(sum.weight),  std::sqrt(sum.logit), std::sqrt(sum.lse),
           std::sqrt(sum.product), std::sqrt(sum.delta), sum.underflow};
  }
}

/// One query head against its kv head.
class HeadGradient {
 public:
  HeadGradient(const GradientArgs& args, const RowStatistics& statistics, std::int64_t head,
               const Rows& k, const Rows& v)
      : args_(args),
        statistics_(statistics),
        head_(head),
        k_(k),
        v_(v),
        q_(args.q, head),
        dout_(args.dout, head) {}

  /// dq of one row, and the squares of its sensitivity.
  void add_query(const Document& document, std::int64_t row, double* dq,
                 Sensitivity& squares) const {
    const std::int64_t visible = count_visible(document, args_.mask, row - document.q_begin);
    const double scale = args_.shape.softmax_scale;
    double keys_moved = 0.0;  // by a delta that is off: in all terms together
    for (std::int64_t j = document.kv_begin; j < document.kv_begin + visible; ++j) {
      const Pair pair = pair_of(row, j);
      add_scaled(scale * pair.ds, k_.row(j), k_.values.dim(), dq);
      const double x = square(scale) * k_.square(j);
      accumulate(squares, sensitivity_of(row, pair, square(pair.ds) * x, square(pair.p) * x, 0.0));
      squares.underflow += lost(std::sqrt(x), pair.slope, k_.values.dim());
      keys_moved += pair.p * std::sqrt(x);
    }
    if (visible == 0) return;
    const double moved = b_squared(row) * square(keys_moved);
    squares.delta += moved;
    squares.logit += moved * square(statistics_.logit_size[place(row)]);
  }

  /// What this head adds to dk and dv of one key, and to the squares of their sensitivities.
  void add_key(const Document& document, std::int64_t key, double* dk, double* dv,
               Sensitivity& dk_squares, Sensitivity& dv_squares) const {
    const double scale = args_.shape.softmax_scale;
    const std::int64_t first = first_viewer(document, args_.mask, key - document.kv_begin);
    for (std::int64_t i = document.q_begin + first; i < document.q_begin + document.q_tokens; ++i) {
      const Pair pair = pair_of(i, key);
      add_scaled(scale * pair.ds, q_.row(i), q_.values.dim(), dk);
      add_scaled(pair.p, dout_.row(i), dout_.values.dim(), dv);
      const double x = square(scale) * q_.square(i);
      const double moved = b_squared(i) * square(pair.p) * x;
      accumulate(dk_squares,
                 sensitivity_of(i, pair, square(pair.ds) * x, square(pair.p) * x, moved));
      accumulate(dv_squares, sensitivity_of(i, pair, square(pair.p) * dout_.square(i), 0.0, 0.0));
      dk_squares.underflow += lost(std::sqrt(x), pair.slope, q_.values.dim());
      dv_squares.underflow += lost(std::sqrt(dout_.square(i)), 1.0, dout_.values.dim());
    }
  }

 private:
  struct Pair {
    double p = 0.0;
    double slope = 0.0;  ///< dout.v - delta
    double ds = 0.0;
    double t_squared = 0.0;
    double a_squared = 0.0;
  };

  std::size_t place(std::int64_t row) const {
    return static_cast<std::size_t>(row * args_.shape.num_heads + head_);
  }

  Pair pair_of(std::int64_t i, std::int64_t j) const {
    const double scale = args_.shape.softmax_scale;
    const double lse = statistics_.lse[place(i)];
    const double logit = scale * dot(q_.row(i), k_.row(j), k_.values.dim());
    const double dp = dot(dout_.row(i), v_.row(j), v_.values.dim());
    Pair pair;
    pair.p = std::exp(logit - lse);
    pair.slope = dp - statistics_.delta[place(i)];
    pair.ds = pair.p * pair.slope;
    pair.t_squared =
        square(logit) + square(statistics_.logit_size[place(i)]) +
        square(scale) * q_.square(i) * k_.square(j) / static_cast<double>(args_.shape.head_dim);
    pair.a_squared =
        square(dp) + dout_.square(i) * v_.square(j) / static_cast<double>(args_.shape.value_dim);
    return pair;
  }

  /// Squares that one term adds: of the term, of p |x|, and of p b |x| where that is its own.
  Sensitivity sensitivity_of(std::int64_t row, const Pair& pair, double term, double weighted,
                             double moved) const {
    const double logit_size = statistics_.logit_size[place(row)];
    return {.weight = term,
            .logit = term * pair.t_squared + moved * square(logit_size),
            .lse = term * square(statistics_.lse[place(row)]),
            .product = weighted * pair.a_squared,
            .delta = moved};
  }

  /// What a term of size x loses when its weight, times the slope, its ds and itself lose 1.
  static double lost(double x, double slope, std::size_t dim) {
    return x * (std::abs(slope) + 1.0) + std::sqrt(static_cast<double>(dim));
  }

  double b_squared(std::int64_t row) const {
    return square(statistics_.delta[place(row)]) + square(statistics_.delta_size[place(row)]);
  }

  const GradientArgs& args_;
  const RowStatistics& statistics_;
  std::int64_t head_;
  const Rows& k_;
  const Rows& v_;
  Rows q_;
  Rows dout_;
};

GradientRows zero_rows(std::size_t rows, std::int64_t heads, std::int64_t dim) {
  const std::size_t states = rows * static_cast<std::size_t>(heads);
  return {std::vector<double>(states * static_cast<std::size_t>(dim)),
          std::vector<Sensitivity>(states)};
}

std::vector<std::int64_t> all_rows(std::int64_t count) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace

RowStatistics statistics_of(const GradientArgs& args, std::span<const std::int64_t> rows,
                            const Tensor& out, const Tensor& lse,
                            std::span<const double> logit_size) {
  check(args);
  check_rows("rows", rows, args.batch.q_rows);
  const AttentionShape& shape = args.shape;
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  require_tensor("out", out, {num_rows, shape.num_heads, shape.value_dim});
  require_tensor("lse", lse, {num_rows, shape.num_heads, 1});
  require(logit_size.empty() ||
              logit_size.size() == rows.size() * static_cast<std::size_t>(shape.num_heads),
          "logit_size has ", logit_size.size(), " elements, expected one for each row and head");
  RowStatistics statistics;
  std::vector<double> out_row(static_cast<std::size_t>(shape.value_dim));
  std::vector<double> dout_row(out_row.size());
  for (std::int64_t i = 0; i < num_rows; ++i) {
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      double row_lse = 0.0;
      double delta = 0.0;
      double squares = 0.0;
      lse.read(i, head, &row_lse);
      if (row_lse != -std::numeric_limits<double>::infinity()) {
        const std::int64_t row = rows[static_cast<std::size_t>(i)];
        out.read(i, head, out_row.data());
        args.dout.read(row, head, dout_row.data());
        for (std::size_t d = 0; d < out_row.size(); ++d) {
          delta += dout_row[d] * out_row[d];
          squares += square(dout_row[d] * out_row[d]);
        }
        double dlse = 0.0;
        if (args.dlse.data != nullptr) args.dlse.read(row, head, &dlse);
        delta -= dlse;
      }
      const std::size_t place = statistics.lse.size();
      statistics.logit_size.push_back(logit_size.empty() ? std::abs(row_lse) : logit_size[place]);
      statistics.lse.push_back(row_lse);
      statistics.delta.push_back(delta);
      statistics.delta_size.push_back(std::sqrt(squares));
    }
  }
  return statistics;
}

RowStatistics row_statistics(const GradientArgs& args) {
  check(args);
  const AttentionResult forward = attention({.shape = args.shape,
                                             .batch = args.batch,
                                             .mask = args.mask,
                                             .q = args.q,
                                             .k = args.k,
                                             .v = args.v,
                                             .rows = {},
                                             .num_threads = args.num_threads});
  const std::int64_t rows = args.batch.q_rows;
  const std::int64_t heads = args.shape.num_heads;
  const auto view = [&](const std::vector<double>& values, std::int64_t dim) {
    return contiguous_view(values.data(), std::array<std::int64_t, 3>{rows, heads, dim});
  };
  return statistics_of(args, all_rows(rows), view(forward.out, args.shape.value_dim),
                       view(forward.lse, 1), forward.logit_size);
}

Gradient gradient_of_rows(const GradientArgs& args, const RowStatistics& statistics,
                          std::span<const std::int64_t> q_rows,
                          std::span<const std::int64_t> kv_rows) {
  check(args);
  check_rows("q_rows", q_rows, args.batch.q_rows);
  check_rows("kv_rows", kv_rows, args.batch.kv_rows);
  const AttentionShape& shape = args.shape;
  const auto states = static_cast<std::size_t>(args.batch.q_rows * shape.num_heads);
  require(statistics.lse.size() == states && statistics.logit_size.size() == states &&
              statistics.delta.size() == states && statistics.delta_size.size() == states,
          "statistics of ", statistics.lse.size(), " rows and heads, expected ", states);

  Gradient result{zero_rows(q_rows.size(), shape.num_heads, shape.head_dim),
                  zero_rows(kv_rows.size(), shape.num_kv_heads, shape.head_dim),
                  zero_rows(kv_rows.size(), shape.num_kv_heads, shape.value_dim)};
  const DocumentFinder q_finder(args.batch, Side::q);
  const DocumentFinder kv_finder(args.batch, Side::kv);
  const auto head_dim = static_cast<std::size_t>(shape.head_dim);
  const auto value_dim = static_cast<std::size_t>(shape.value_dim);
  for (std::int64_t head = 0; head < shape.num_heads; ++head) {
    const std::int64_t kv_head = head / shape.group_size();
    const Rows k(args.k, kv_head);
    const Rows v(args.v, kv_head);
    const HeadGradient one(args, statistics, head, k, v);
    deal(q_rows.size(), args.num_threads, [&](std::size_t i) {
      const Document* document = q_finder.find(q_rows[i]);
      const std::size_t place =
          i * static_cast<std::size_t>(shape.num_heads) + static_cast<std::size_t>(head);
      if (document == nullptr) return;
      one.add_query(*document, q_rows[i], &result.dq.values[place * head_dim],
                    result.dq.sensitivities[place]);
    });
    deal(kv_rows.size(), args.num_threads, [&](std::size_t i) {
      const Document* document = kv_finder.find(kv_rows[i]);
      const std::size_t place =
          i * static_cast<std::size_t>(shape.num_kv_heads) + static_cast<std::size_t>(kv_head);
      if (document == nullptr) return;
      one.add_key(*document, kv_rows[i], &result.dk.values[place * head_dim],
                  &result.dv.values[place * value_dim], result.dk.sensitivities[place],
                  result.dv.sensitivities[place]);
    });
  }
  take_roots(result.dq.sensitivities);
  take_roots(result.dk.sensitivities);
  take_roots(result.dv.sensitivities);
  return result;
}

Gradient gradient(const GradientArgs& args) {
  return gradient_of_rows(args, row_statistics(args), all_rows(args.batch.q_rows),
                          all_rows(args.batch.kv_rows));
}

}  // namespace cpattn::reference
