#include "launch/logit_magnitude.h"

#include <cmath>

namespace cpattn {
namespace {

constexpr std::size_t kMostRows = 8;

const Document* document_of(const SequenceBatch& batch, std::int64_t row) {
  for (const Document& document : batch.documents) {
    if (row >= document.q_begin && row < document.q_begin + document.q_tokens) return &document;
  }
  return nullptr;
}

/// sum_j p_j |s_j| of one row and head.
double weighted_logit(const reference::AttentionArgs& args, std::int64_t row, std::int64_t head,
                      std::int64_t num_keys, double lse) {
  const Document* document = document_of(args.batch, row);
  if (document == nullptr || !std::isfinite(lse)) return 0.0;
  const auto dim = static_cast<std::size_t>(args.shape.head_dim);
  std::vector<double> q(dim);
  std::vector<double> k(dim);
  args.q.read(row, head, q.data());
  double sum = 0.0;
  for (std::int64_t j = 0; j < num_keys; ++j) {
    args.k.read(document->kv_begin + j, head / args.shape.group_size(), k.data());
    const double logit = args.shape.softmax_scale * reference::dot(q.data(), k.data(), dim);
    sum += std::exp(logit - lse) * std::fabs(logit);
  }
  return std::isfinite(sum) ? sum : 0.0;
}

/// Up to kMostRows of `from`, the first and the last among them.
std::vector<std::size_t> spread(const std::vector<std::size_t>& from) {
  if (from.size() <= kMostRows) return from;
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < kMostRows; ++i) {
    chosen.push_back(from[i * (from.size() - 1) / (kMostRows - 1)]);
  }
  return chosen;
}

}  // namespace

std::vector<double> logit_magnitudes(const reference::AttentionArgs& args,
                                     std::span<const double> lse,
                                     std::span<const std::int32_t> chunk_of_row,
                                     std::span<const std::int64_t> visible_keys,
                                     std::int32_t num_chunks) {
  std::vector<std::vector<std::size_t>> members(static_cast<std::size_t>(num_chunks));
  for (std::size_t i = 0; i < args.rows.size(); ++i) {
    members[static_cast<std::size_t>(chunk_of_row[i])].push_back(i);
  }
  const auto heads = static_cast<std::size_t>(args.shape.num_heads);
  std::vector<double> magnitudes(members.size() * heads, 0.0);
  for (std::size_t chunk = 0; chunk < members.size(); ++chunk) {
    const std::vector<std::size_t> sample = spread(members[chunk]);
    for (std::size_t head = 0; head < heads; ++head) {
      double squares = 0.0;
      for (const std::size_t i : sample) {
        const double logit = weighted_logit(args, args.rows[i], static_cast<std::int64_t>(head),
                                            visible_keys[i], lse[i * heads + head]);
        squares += logit * logit;
      }
      if (sample.empty()) continue;
      magnitudes[chunk * heads + head] = std::sqrt(squares / static_cast<double>(sample.size()));
    }
  }
  return magnitudes;
}

}  // namespace cpattn
