// What the reference reads: tensors of any of our types or of double, one head at a time as a
// matrix of doubles. Everything after that is arithmetic on doubles.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "src/base/tensor_view.h"

namespace cpattn::reference {

/// A read-only view [rows, heads, dim] of f32, f16, bf16 or double elements. Implicit, so that a
/// caller passes the view it has.
struct Tensor {
  const void* data = nullptr;
  std::optional<DType> dtype;  ///< nothing: double
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> strides{};  ///< in elements; the last is 1

  Tensor() = default;
  template <class Void>
  Tensor(const BasicAnyTensor<Void>& view)  // NOLINT(google-explicit-constructor)
      : data(view.data), dtype(view.dtype), shape(view.shape), strides(view.strides) {}
  Tensor(const TensorView<const double, 3>& view)  // NOLINT(google-explicit-constructor)
      : data(view.data), shape(view.shape), strides(view.strides) {}

  /// Copies the elements of (row, head).
  void read(std::int64_t row, std::int64_t head, double* to) const;
};

/// InvalidArgument naming the tensor unless it has this shape and a contiguous last dimension.
void require_tensor(std::string_view name, const Tensor& tensor,
                    const std::array<std::int64_t, 3>& shape);

/// One head of a tensor, contiguous.
class HeadMatrix {
 public:
  HeadMatrix(const Tensor& tensor, std::int64_t head);
  const double* row(std::int64_t i) const {
    return values_.data() + static_cast<std::size_t>(i) * dim_;
  }
  std::size_t dim() const { return dim_; }

 private:
  std::size_t dim_;
  std::vector<double> values_;
};

/// sum_d a[d] b[d].
double dot(const double* a, const double* b, std::size_t dim);

/// sum[d] += factor * terms[d].
void add_scaled(double factor, const double* terms, std::size_t dim, double* sum);

}  // namespace cpattn::reference
