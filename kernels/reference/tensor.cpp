#include "kernels/reference/tensor.h"

#include <algorithm>

#include "src/base/error.h"

namespace cpattn::reference {

void Tensor::read(std::int64_t row, std::int64_t head, double* to) const {
  const std::int64_t place = row * strides[0] + head * strides[1];
  if (!dtype) {
    std::copy_n(static_cast<const double*>(data) + place, shape[2], to);
    return;
  }
  for (std::int64_t d = 0; d < shape[2]; ++d) {
    to[d] = static_cast<double>(load_as_float(data, *dtype, place + d));
  }
}

void require_tensor(std::string_view name, const Tensor& tensor,
                    const std::array<std::int64_t, 3>& shape) {
  require(tensor.shape == shape, name, " is [", tensor.shape[0], ", ", tensor.shape[1], ", ",
          tensor.shape[2], "], expected [", shape[0], ", ", shape[1], ", ", shape[2], "]");
  require(tensor.strides[2] == 1, name, " has stride ", tensor.strides[2],
          " in its last dimension, expected 1");
  require(tensor.data != nullptr || shape[0] == 0, name, " has no data, expected ", shape[0],
          " rows");
}

HeadMatrix::HeadMatrix(const Tensor& tensor, std::int64_t head)
    : dim_(static_cast<std::size_t>(tensor.shape[2])),
      values_(static_cast<std::size_t>(tensor.shape[0]) * dim_) {
  for (std::int64_t row = 0; row < tensor.shape[0]; ++row) {
    tensor.read(row, head, values_.data() + static_cast<std::size_t>(row) * dim_);
  }
}

double dot(const double* a, const double* b, std::size_t dim) {
  // Eight running sums only hide the latency of the addition.
  constexpr std::size_t kSums = 8;
  std::array<double, kSums> sums{};
  std::size_t d = 0;
  for (; d + kSums <= dim; d += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) sums[i] += a[d + i] * b[d + i];
  }
  for (; d < dim; ++d) sums[0] += a[d] * b[d];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void add_scaled(double factor, const double* terms, std::size_t dim, double* sum) {
  for (std::size_t d = 0; d < dim; ++d) sum[d] += factor * terms[d];
}

}  // namespace cpattn::reference
