// Compares two results: bit for bit, and as an error against the double-precision reference.
//
// Pure functions of their arguments; nothing is sampled, nothing is read or printed. A comparison
// of nothing, a NaN on either side and an infinity that is not matched are all failures: a check
// must be able to fail.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/dtype.h"
#include "src/base/tensor_view.h"

namespace cpattn {

/// Where an element of a tensor [rows, heads, channels] is; `row` is a global row.
struct ElementPlace {
  std::int64_t row = 0;
  std::int64_t head = 0;
  std::int64_t channel = 0;
};

struct BitDifference {
  ElementPlace place;
  float candidate = 0.0f;
  float expected = 0.0f;
  std::uint32_t candidate_bits = 0;  ///< in the storage type
  std::uint32_t expected_bits = 0;
};

struct BitComparison {
  std::int64_t compared = 0;
  std::int64_t mismatches = 0;  ///< elements whose bytes differ; -0 and +0 differ, equal NaNs agree
  std::optional<BitDifference> first;  ///< in (row, head, channel) order
};

/// Compares the storage bytes of rows `rows` of two tensors.
///
/// Errors  InvalidArgument when type or shape differ, or both are the same memory (a result
/// compared
///         with itself says nothing).
/// Cost    one pass over both.
BitComparison compare_bits(const AnyConstTensor& candidate, const AnyConstTensor& expected,
                           std::span<const std::int64_t> rows);

/// "row 5 head 2 channel 0: 1.5 (0x3fc00000), expected 1.25 (0x3fa00000)"
std::string to_string(const BitDifference& difference);

/// The exact values some rows should have, and how far a candidate may be from them.
///
/// Error of a group (one head of one chunk) is the 2-norm of candidate - expected over its
/// elements; it may be at most
///   max(relative[g] * max(norm(expected), floor * sqrt(elements)), absolute[g])
///   + rounding_share * norm(round(expected, rounded_to) - expected),     g = chunk * heads + head.
/// Where absolute[g] is the larger one, terms of a sum have cancelled and left less than their
/// rounding; errors are then stated relative to absolute[g].
/// Any single element differs by less than its group does, so the same allowance bounds the largest
/// deviation as well: the criterion sees magnitudes, never directions.
struct Expectation {
  std::span<const std::int64_t> rows;          ///< global rows, in the order of `values`
  std::span<const double> values;              ///< [rows, heads, channels]
  std::span<const std::int32_t> chunk_of_row;  ///< group of each row, in [0, num_chunks)
  std::int32_t num_chunks = 0;
  std::span<const double> relative;    ///< [num_chunks, heads]
  std::span<const double> absolute{};  ///< [num_chunks, heads], or empty: zeros
  double floor = 0.0;                  ///< least magnitude an element counts with
  DType rounded_to = DType::f32;
  double rounding_share = 0.0;
};

struct ErrorSummary {
  std::int64_t compared = 0;
  std::int64_t nan_candidate = 0;  ///< NaN where a number is expected
  std::int64_t nan_expected = 0;   ///< a number where NaN is expected
  std::int64_t nan_both = 0;
  std::int64_t infinity_mismatch = 0;  ///< an infinity that the other side does not have
  std::optional<ElementPlace>
      first_not_comparable;  ///< the first element counted in the four above

  double rel_l2 = 0.0;   ///< over all comparable elements
  double cosine = 1.0;   ///< an observation, never a criterion: it cannot see a wrong factor
  double max_abs = 0.0;  ///< never NaN
  ElementPlace max_abs_at;

  // the group nearest to, or furthest beyond, what it may differ
  double worst_rel_l2 = 0.0;
  double worst_allowed = 0.0;  ///< allowance of that group, relative to the same norm
  double worst_ratio = 0.0;    ///< its error over its allowance; passes up to 1
  std::int64_t worst_head = 0;
  std::int32_t worst_chunk = 0;

  bool passes() const;
};

/// Compares a candidate [all rows, heads, channels] with the rows of an expectation.
///
/// Infinities that agree are equal and take no part in norms. Elements that cannot be subtracted
/// (NaN, unmatched infinity) are counted and leave max_abs and the norms finite.
/// Errors  InvalidArgument for sizes that do not fit together.
ErrorSummary compare_error(const AnyConstTensor& candidate, const Expectation& expected);

/// Every reason an ErrorSummary does not pass, one sentence each; `tensor` is its name.
std::vector<std::string> reasons(const ErrorSummary& summary, const std::string& tensor);

/// Whether this build still has NaN and infinity: comparisons with NaN are false, and -inf - -inf
/// is NaN. A build with "fast" arithmetic does not, and then no comparison here means anything.
bool has_ieee_semantics();

}  // namespace cpattn
