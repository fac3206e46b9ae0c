#include "launch/inputs_source.h"

#include "src/base/error.h"

namespace cpattn::detail {

std::array<std::int64_t, 3> extent_of(const InputInfo& info, TensorRole role) {
  const AttentionShape& shape = info.shape;
  switch (role) {
    case TensorRole::q:
      return {info.batch.q_rows, shape.num_heads, shape.head_dim};
    case TensorRole::k:
      return {info.batch.kv_rows, shape.num_kv_heads, shape.head_dim};
    case TensorRole::v:
      return {info.batch.kv_rows, shape.num_kv_heads, shape.value_dim};
    case TensorRole::dout:
      return {info.batch.q_rows, shape.num_heads, shape.value_dim};
    case TensorRole::dlse:
      return {info.batch.q_rows, shape.num_heads, 1};
  }
  return {};
}

void check_read(const InputInfo& info, TensorRole role, std::int64_t row_begin,
                const AnyTensor& dst) {
  const auto [rows, heads, dim] = extent_of(info, role);
  require(dst.shape[1] == heads && dst.shape[2] == dim, info.name, ": reading ", name_of(role),
          " into [", dst.shape[0], ", ", dst.shape[1], ", ", dst.shape[2], "], expected [n, ",
          heads, ", ", dim, "]");
  require(dst.has_contiguous_rows(), info.name, ": reading ", name_of(role), " with stride ",
          dst.strides[2], " in the last dimension, expected 1");
  require(
      dst.shape[0] >= 0 && row_begin >= 0 && row_begin <= rows && dst.shape[0] <= rows - row_begin,
      info.name, ": reading ", dst.shape[0], " rows of ", name_of(role), " from row ", row_begin,
      ", expected a range within its ", rows, " rows");
}

}  // namespace cpattn::detail
