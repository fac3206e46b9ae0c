#include "launch/compare.h"

#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "src/base/error.h"

namespace cpattn {
namespace {

std::uint32_t stored_bits(const AnyConstTensor& tensor, std::int64_t row, std::int64_t head,
                          std::int64_t channel) {
  const std::byte* element =
      tensor.row(row, head) + channel * static_cast<std::int64_t>(size_of(tensor.dtype));
  if (tensor.dtype == DType::f32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, element, sizeof(bits));
    return bits;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, element, sizeof(bits));
  return bits;
}

void require_row(std::int64_t row, const AnyConstTensor& tensor) {
  require(row >= 0 && row < tensor.shape[0], "row ", row, " to compare: the tensor has ",
          tensor.shape[0], " rows");
}

/// Sums of one group (one head of one chunk).
struct GroupSums {
  double error = 0.0;     ///< sum of (candidate - expected)^2
  double expected = 0.0;  ///< sum of expected^2
  double rounding = 0.0;  ///< sum of (round(expected) - expected)^2
  std::int64_t elements = 0;
};

/// What an element contributes when it is not an ordinary number on both sides.
enum class Comparable { yes, equal, no };

Comparable classify(double candidate, double expected, ErrorSummary& summary) {
  if (std::isnan(candidate) || std::isnan(expected)) {
    if (std::isnan(candidate) && std::isnan(expected)) {
      ++summary.nan_both;
    } else if (std::isnan(candidate)) {
      ++summary.nan_candidate;
    } else {
      ++summary.nan_expected;
    }
    return Comparable::no;
  }
  if (std::isinf(candidate) || std::isinf(expected)) {
    if (candidate == expected) return Comparable::equal;
    ++summary.infinity_mismatch;
    return Comparable::no;
  }
  return Comparable::yes;
}

double rounded(double value, DType dtype) {
  float stored = static_cast<float>(value);
  if (dtype == DType::bf16) stored = to_float(to_bf16(stored));
  if (dtype == DType::f16) stored = to_float(to_f16(stored));
  return static_cast<double>(stored);
}

/// One pass over a candidate; keeps the sums of every group.
class ErrorPass {
 public:
  ErrorPass(const AnyConstTensor& candidate, const Expectation& expected)
      : candidate_(candidate),
        expected_(expected),
        heads_(candidate.shape[1]),
        channels_(candidate.shape[2]),
        groups_(static_cast<std::size_t>(expected.num_chunks * heads_)) {}

  ErrorSummary run() {
    for (std::size_t i = 0; i < expected_.rows.size(); ++i) {
      require_row(expected_.rows[i], candidate_);
      for (std::int64_t head = 0; head < heads_; ++head) add_row(i, head);
    }
    finish();
    return summary_;
  }

 private:
  void add_row(std::size_t i, std::int64_t head) {
    const std::int64_t row = expected_.rows[i];
    GroupSums& group = groups_[static_cast<std::size_t>(expected_.chunk_of_row[i] * heads_ + head)];
    const void* elements = candidate_.row(row, head);
    const double* values =
        expected_.values.data() + (static_cast<std::int64_t>(i) * heads_ + head) * channels_;
    for (std::int64_t channel = 0; channel < channels_; ++channel) {
      add_element({row, head, channel},
                  static_cast<double>(load_as_float(elements, candidate_.dtype, channel)),
                  values[channel], group);
    }
  }

  void add_element(const ElementPlace& place, double candidate, double value, GroupSums& group) {
    ++summary_.compared;
    const double stored =
        expected_.rounding_share > 0.0 ? rounded(value, expected_.rounded_to) : value;
    // An exact value beyond the range of a 16-bit type is stored as infinity, and rightly so.
    const Comparable kind = classify(candidate, std::isinf(stored) ? stored : value, summary_);
    if (kind == Comparable::no && !summary_.first_not_comparable) {
      summary_.first_not_comparable = place;
    }
    if (kind != Comparable::yes) return;
    const double error = candidate - value;
    group.error += error * error;
    group.expected += value * value;
    ++group.elements;
    group.rounding += (stored - value) * (stored - value);
    candidate_squares_ += candidate * candidate;
    products_ += candidate * value;
    if (std::fabs(error) > summary_.max_abs) {
      summary_.max_abs = std::fabs(error);
      summary_.max_abs_at = place;
    }
  }

  void finish() {
    GroupSums total;
    double absolute_squares = 0.0;
    for (std::int32_t chunk = 0; chunk < expected_.num_chunks; ++chunk) {
      for (std::int64_t head = 0; head < heads_; ++head) {
        const std::size_t index = static_cast<std::size_t>(chunk * heads_ + head);
        const double absolute = expected_.absolute.empty() ? 0.0 : expected_.absolute[index];
        judge_group(chunk, head, groups_[index], expected_.relative[index], absolute);
        absolute_squares += absolute * absolute;
        total.error += groups_[index].error;
        total.expected += groups_[index].expected;
        total.elements += groups_[index].elements;
      }
    }
    summary_.rel_l2 =
        relative(std::sqrt(total.error), std::max(norm(total), std::sqrt(absolute_squares)));
    const double norms = std::sqrt(candidate_squares_) * std::sqrt(total.expected);
    if (norms > 0.0) summary_.cosine = products_ / norms;
  }

  double norm(const GroupSums& group) const {
    return std::max(std::sqrt(group.expected),
                    expected_.floor * std::sqrt(static_cast<double>(group.elements)));
  }

  static double relative(double error, double norm) {
    if (error == 0.0) return 0.0;
    return norm > 0.0 ? error / norm : std::numeric_limits<double>::infinity();
  }

  void judge_group(std::int32_t chunk, std::int64_t head, const GroupSums& group,
                   double relative_bound, double absolute_bound) {
    const double error = std::sqrt(group.error);
    const double scale = std::max(norm(group), absolute_bound);
    const double allowed = std::max(relative_bound * norm(group), absolute_bound) +
                           expected_.rounding_share * std::sqrt(group.rounding);
    const double ratio = relative(error, allowed);
    const bool is_first = chunk == 0 && head == 0;
    if (!is_first && ratio <= summary_.worst_ratio) return;
    summary_.worst_ratio = ratio;
    summary_.worst_rel_l2 = relative(error, scale);
    summary_.worst_allowed = scale > 0.0 ? allowed / scale : relative_bound;
    summary_.worst_head = head;
    summary_.worst_chunk = chunk;
  }

  AnyConstTensor candidate_;
  Expectation expected_;
  std::int64_t heads_;
  std::int64_t channels_;
  std::vector<GroupSums> groups_;
  ErrorSummary summary_;
  double candidate_squares_ = 0.0;
  double products_ = 0.0;
};

std::string to_string(const ElementPlace& place) {
  return fmt::format("row {} head {} channel {}", place.row, place.head, place.channel);
}

}  // namespace

BitComparison compare_bits(const AnyConstTensor& candidate, const AnyConstTensor& expected,
                           std::span<const std::int64_t> rows) {
  require(candidate.dtype == expected.dtype, "cannot compare the bits of ",
          name_of(candidate.dtype), " with those of ", name_of(expected.dtype));
  require(candidate.shape == expected.shape, "cannot compare [", candidate.shape[0], ", ",
          candidate.shape[1], ", ", candidate.shape[2], "] with [", expected.shape[0], ", ",
          expected.shape[1], ", ", expected.shape[2], "]");
  require(candidate.data != expected.data || candidate.data == nullptr,
          "a result was compared with itself");
  BitComparison result;
  for (const std::int64_t row : rows) {
    require_row(row, candidate);
    for (std::int64_t head = 0; head < candidate.shape[1]; ++head) {
      for (std::int64_t channel = 0; channel < candidate.shape[2]; ++channel) {
        ++result.compared;
        const std::uint32_t got = stored_bits(candidate, row, head, channel);
        const std::uint32_t want = stored_bits(expected, row, head, channel);
        if (got == want) continue;
        if (result.mismatches++ == 0) {
          result.first =
              BitDifference{{row, head, channel},
                            load_as_float(candidate.row(row, head), candidate.dtype, channel),
                            load_as_float(expected.row(row, head), expected.dtype, channel),
                            got,
                            want};
        }
      }
    }
  }
  return result;
}

std::string to_string(const BitDifference& difference) {
  return fmt::format("{}: {:.9g} (0x{:x}), expected {:.9g} (0x{:x})", to_string(difference.place),
                     difference.candidate, difference.candidate_bits, difference.expected,
                     difference.expected_bits);
}

bool ErrorSummary::passes() const {
  return compared > 0 && nan_candidate == 0 && nan_expected == 0 && nan_both == 0 &&
         infinity_mismatch == 0 && worst_ratio <= 1.0;
}

ErrorSummary compare_error(const AnyConstTensor& candidate, const Expectation& expected) {
  const std::size_t row_elements =
      static_cast<std::size_t>(candidate.shape[1] * candidate.shape[2]);
  require(expected.values.size() == expected.rows.size() * row_elements, "the reference holds ",
          expected.values.size(), " values, expected ", expected.rows.size() * row_elements);
  require(expected.chunk_of_row.size() == expected.rows.size(), "chunk_of_row has ",
          expected.chunk_of_row.size(), " entries, expected ", expected.rows.size());
  require(expected.relative.size() ==
              static_cast<std::size_t>(expected.num_chunks * candidate.shape[1]),
          "there are ", expected.relative.size(), " bounds, expected one for each head and chunk");
  require(expected.absolute.empty() || expected.absolute.size() == expected.relative.size(),
          "there are ", expected.absolute.size(), " absolute bounds, expected none or ",
          expected.relative.size());
  for (const std::int32_t chunk : expected.chunk_of_row) {
    require(chunk >= 0 && chunk < expected.num_chunks, "chunk ", chunk, " of ",
            expected.num_chunks);
  }
  return ErrorPass(candidate, expected).run();
}

std::vector<std::string> reasons(const ErrorSummary& summary, const std::string& tensor) {
  std::vector<std::string> found;
  if (summary.compared == 0) found.push_back(tensor + ": nothing was compared with the reference");
  const auto count = [&](std::int64_t number, const char* what) {
    if (number == 0) return;
    found.push_back(
        fmt::format("{}: {} element{} {}", tensor, number, number == 1 ? "" : "s", what));
  };
  count(summary.nan_candidate, "NaN where the reference has a number");
  count(summary.nan_expected, "a number where the reference has NaN");
  count(summary.nan_both, "NaN in the result and in the reference");
  count(summary.infinity_mismatch, "infinite on one side only, or with the other sign");
  if (!found.empty() && summary.first_not_comparable) {
    found.back() += ", first at " + to_string(*summary.first_not_comparable);
  }
  if (!(summary.worst_ratio <= 1.0)) {
    found.push_back(fmt::format(
        "{}: relative L2 error {:.3g} against the reference in head {} chunk {} exceeds {:.3g} "
        "(largest deviation {:.3g} at {})",
        tensor, summary.worst_rel_l2, summary.worst_head, summary.worst_chunk,
        summary.worst_allowed, summary.max_abs, to_string(summary.max_abs_at)));
  }
  return found;
}

bool has_ieee_semantics() {
  volatile float zero = 0.0f;  // volatile: the compiler may not fold what is being asked
  const float infinity = 1.0f / zero;
  const float nan = zero / zero;
  volatile float difference = -infinity - -infinity;
  volatile float denormal = std::numeric_limits<float>::min();
  denormal = denormal / 2.0f;
  return !(nan == nan) && !(nan > 1.0f) && !(nan <= 1.0f) && std::isnan(difference) &&
         std::isnan(static_cast<float>(nan)) && std::isinf(static_cast<float>(infinity)) &&
         denormal > 0.0f;
}

}  // namespace cpattn
