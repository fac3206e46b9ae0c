#include "cp/tensor_check.h"

#include <algorithm>

#include "src/base/error.h"

namespace cpattn {

void TensorCheck::add(const std::string& problem) {
  problems_ += (problems_.empty() ? "" : "; ") + problem;
}

void TensorCheck::check_place(std::string_view name, const void* data, std::int64_t rows) {
  if (rows == 0) return;
  if (const std::string problem = device_.problem_with(data); !problem.empty())
    add(detail::concat(name, ": ", problem));
}

void TensorCheck::tensor(std::string_view name, const AnyConstTensor& tensor,
                         std::initializer_list<DType> dtypes, std::int64_t rows, std::int64_t heads,
                         std::int64_t dim) {
  const bool is_dtype = std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end();
  const bool is_shape =
      tensor.shape[0] == rows && tensor.shape[1] == heads && tensor.shape[2] == dim;
  const bool is_there = tensor.data != nullptr || rows == 0;
  if (is_dtype && is_shape && tensor.has_contiguous_rows() && is_there) {
    return check_place(name, tensor.data, rows);
  }
  std::string expected;
  for (const DType* dtype = dtypes.begin(); dtype != dtypes.end(); ++dtype) {
    if (std::find(dtypes.begin(), dtype, *dtype) != dtype) continue;  // listed already
    expected += (expected.empty() ? "" : " or ") + std::string(name_of(*dtype));
  }
  add(detail::concat(name, ": ", name_of(tensor.dtype), " [", tensor.shape[0], ", ",
                     tensor.shape[1], ", ", tensor.shape[2], "], last stride ", tensor.strides[2],
                     tensor.data == nullptr ? ", null" : "", "; expected ", expected, " [", rows,
                     ", ", heads, ", ", dim, "] with a contiguous last dimension"));
}

void TensorCheck::matrix(std::string_view name, const TensorView<const float, 2>& view,
                         std::int64_t rows, std::int64_t heads) {
  const bool is_there = view.data != nullptr || rows == 0;
  if (view.shape[0] == rows && view.shape[1] == heads && is_there) {
    return check_place(name, view.data, rows);
  }
  add(detail::concat(name, ": [", view.shape[0], ", ", view.shape[1], "]",
                     view.data == nullptr ? ", null" : "", "; expected [", rows, ", ", heads, "]"));
}

void TensorCheck::vector(std::string_view name, const TensorView<float, 1>& view,
                         std::int64_t size) {
  if (view.data == nullptr) return;
  if (view.shape[0] == size && (view.strides[0] == 1 || size == 1)) {
    return check_place(name, view.data, size);
  }
  add(detail::concat(name, ": [", view.shape[0], "], stride ", view.strides[0], "; expected [",
                     size, "], contiguous"));
}

void TensorCheck::separate(std::initializer_list<Named> outputs,
                           std::initializer_list<Named> inputs) {
  if (!problems_.empty()) return;
  constexpr std::string_view kExpected = "; expected elements of its own";
  for (const Named* out = outputs.begin(); out != outputs.end(); ++out) {
    if (overlaps_itself(out->rows)) {
      add(detail::concat(out->name, ": its rows overlap each other", kExpected));
    }
    const auto check = [&](const Named& other) {
      if (!overlap(out->rows, other.rows)) return;
      add(detail::concat(out->name, ": shares elements with ", other.name, kExpected));
    };
    std::for_each(out + 1, outputs.end(), check);
    std::for_each(inputs.begin(), inputs.end(), check);
  }
}

}  // namespace cpattn
