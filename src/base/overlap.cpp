#include "src/base/overlap.h"

#include <algorithm>
#include <utility>

namespace cpattn {
namespace {

std::int64_t floor_div(std::int64_t a, std::int64_t b) {  // b > 0
  return a / b - (a % b < 0 ? 1 : 0);
}

/// Strides positive and outermost first; a dimension of one element has stride 1, so that its size
/// never matters. Rows of stride 0 are one row.
RowSet normalized(RowSet rows) {
  for (std::size_t i = 0; i < 2; ++i) {
    if (rows.strides[i] < 0) {
      rows.address += (rows.counts[i] - 1) * rows.strides[i];
      rows.strides[i] = -rows.strides[i];
    }
    if (rows.strides[i] == 0) rows.counts[i] = std::min<std::int64_t>(rows.counts[i], 1);
    if (rows.counts[i] <= 1) rows.strides[i] = 1;
  }
  if (rows.strides[0] < rows.strides[1]) {
    std::swap(rows.strides[0], rows.strides[1]);
    std::swap(rows.counts[0], rows.counts[1]);
  }
  return rows;
}

bool is_empty(const RowSet& rows) {
  return rows.counts[0] <= 0 || rows.counts[1] <= 0 || rows.row_bytes <= 0;
}

/// Bytes from the first to the last of one outer index, and of all.
std::int64_t inner_extent(const RowSet& rows) {
  return (rows.counts[1] - 1) * rows.strides[1] + rows.row_bytes;
}
std::int64_t extent(const RowSet& rows) {
  return (rows.counts[0] - 1) * rows.strides[0] + inner_extent(rows);
}

/// Indices [first, last] of the runs [index * stride, index * stride + length), index in [0,
/// count), that meet [begin, begin + bytes).
struct Meeting {
  std::int64_t first;
  std::int64_t last;
};
Meeting meeting(std::int64_t begin, std::int64_t bytes, std::int64_t stride, std::int64_t length,
                std::int64_t count) {
  return {std::max<std::int64_t>(floor_div(begin - length, stride) + 1, 0),
          std::min<std::int64_t>(floor_div(begin + bytes - 1, stride), count - 1)};
}

/// Rows of one outer index of each; those of b begin `offset` bytes after those of a.
bool inner_overlap(const RowSet& a, const RowSet& b, std::int64_t offset) {
  for (std::int64_t i = 0; i < a.counts[1]; ++i) {
    const Meeting rows =
        meeting(i * a.strides[1] - offset, a.row_bytes, b.strides[1], b.row_bytes, b.counts[1]);
    if (rows.first <= rows.last) return true;
  }
  return false;
}

/// The outer index i of a against all of b.
bool outer_overlap(const RowSet& a, const RowSet& b, std::int64_t i) {
  const std::int64_t offset = b.address - a.address - i * a.strides[0];
  const Meeting outer =
      meeting(-offset, inner_extent(a), b.strides[0], inner_extent(b), b.counts[0]);
  for (std::int64_t u = outer.first; u <= outer.last; ++u)
    if (inner_overlap(a, b, offset + u * b.strides[0])) return true;
  return false;
}

}  // namespace

RowSet rows_of(const AnyConstTensor& tensor) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  return {reinterpret_cast<std::intptr_t>(tensor.data),
          {tensor.shape[0], tensor.shape[1]},
          {tensor.strides[0] * size, tensor.strides[1] * size},
          tensor.data == nullptr ? 0 : tensor.shape[2] * size};
}

bool overlap(const RowSet& left, const RowSet& right) {
  if (is_empty(left) || is_empty(right)) return false;
  RowSet a = normalized(left), b = normalized(right);
  if (a.address + extent(a) <= b.address || b.address + extent(b) <= a.address) return false;
  if (a.strides[0] == b.strides[0] && a.counts[0] > 1 && b.counts[0] > 1) {
    // Only the difference of the outer indices counts: index 0 of one against all of the other,
    // both ways round, meets every difference that occurs.
    return outer_overlap(a, b, 0) || outer_overlap(b, a, 0);
  }
  if (a.counts[0] > b.counts[0]) std::swap(a, b);
  for (std::int64_t i = 0; i < a.counts[0]; ++i)
    if (outer_overlap(a, b, i)) return true;
  return false;
}

bool overlaps_itself(const RowSet& view) {
  if (is_empty(view)) return false;
  for (std::size_t i = 0; i < 2; ++i)
    if (view.counts[i] > 1 && view.strides[i] == 0) return true;
  const RowSet rows = normalized(view);
  if (rows.counts[1] > 1 && rows.strides[1] < rows.row_bytes) return true;
  if (rows.counts[0] == 1) return false;
  RowSet later = rows;  // all but the first outer index
  later.address += rows.strides[0];
  later.counts[0] -= 1;
  return outer_overlap(rows, later, 0);
}

}  // namespace cpattn
