// TensorCheck: what is wrong with the tensors of one call, all of it, in one text.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "src/base/overlap.h"
#include "src/base/tensor_view.h"
#include "src/device/device.h"

namespace cpattn {

class TensorCheck {
 public:
  /// Tensors are expected in memory that `device` takes; it must outlive this.
  explicit TensorCheck(const Device& device) : device_(device) {}

  /// What is expected of a tensor [rows, heads, dim]: one of `dtypes`, which may name one
  /// twice, and a contiguous last dimension.
  void tensor(std::string_view name, const AnyConstTensor& tensor,
              std::initializer_list<DType> dtypes, std::int64_t rows, std::int64_t heads,
              std::int64_t dim);
  void matrix(std::string_view name, const TensorView<const float, 2>& view, std::int64_t rows,
              std::int64_t heads);

  /// No data is fine.
  void vector(std::string_view name, const TensorView<float, 1>& view, std::int64_t size);

  struct Named {
    std::string_view name;
    RowSet rows;
  };
  /// No element of an output is another one of it, or one of another output or of an input. Views
  /// that interleave in one buffer are fine. Says nothing while a shape is wrong.
  void separate(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs);

  /// "" when nothing is wrong.
  const std::string& problems() const { return problems_; }

 private:
  void add(const std::string& problem);
  void check_place(std::string_view name, const void* data, std::int64_t rows);

  const Device& device_;
  std::string problems_;
};

}  // namespace cpattn
