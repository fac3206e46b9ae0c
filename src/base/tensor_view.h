// Non-owning, strided views: TensorView knows its element type, AnyTensor carries it at run time.
//
// Strides are in elements and may be negative; all offsets are 64-bit. A view never outlives what
// it looks at.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "src/base/dtype.h"

namespace cpattn {

template <class T, int Rank>
struct TensorView {
  T* data = nullptr;
  std::array<std::int64_t, Rank> shape{};
  std::array<std::int64_t, Rank> strides{};

  template <class... Index>
  std::int64_t offset(Index... index) const {
    static_assert(sizeof...(Index) == Rank);
    const std::array<std::int64_t, Rank> place{static_cast<std::int64_t>(index)...};
    std::int64_t sum = 0;
    for (int i = 0; i < Rank; ++i) sum += place[i] * strides[i];
    return sum;
  }

  template <class... Index>
  T& operator()(Index... index) const {
    return data[offset(index...)];
  }
};

/// Row-major strides: the last dimension is contiguous.
template <std::size_t Rank>
constexpr std::array<std::int64_t, Rank> contiguous_strides(
    const std::array<std::int64_t, Rank>& shape) {
  std::array<std::int64_t, Rank> strides{};
  std::int64_t step = 1;
  for (std::size_t i = Rank; i-- > 0;) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

template <class T, std::size_t Rank>
TensorView<T, static_cast<int>(Rank)> contiguous_view(T* data,
                                                      const std::array<std::int64_t, Rank>& shape) {
  return {data, shape, contiguous_strides(shape)};
}

/// A rank-3 tensor [tokens, heads, dim] whose element type is known at run time only.
template <class Void>
struct BasicAnyTensor {
  Void* data = nullptr;
  DType dtype = DType::f32;
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> strides{};  ///< in elements; has_contiguous_rows()

  std::int64_t offset(std::int64_t token, std::int64_t head) const {
    return token * strides[0] + head * strides[1];
  }

  /// Whether the channels of a row follow each other. A last stride that leads nowhere, for there
  /// is one channel or no element at all, may be anything.
  bool has_contiguous_rows() const {
    return strides[2] == 1 || shape[2] <= 1 || shape[0] == 0 || shape[1] == 0;
  }

  /// Address of (token, head, 0).
  auto* row(std::int64_t token, std::int64_t head) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    return static_cast<Byte*>(data) +
           offset(token, head) * static_cast<std::int64_t>(size_of(dtype));
  }

  operator BasicAnyTensor<const void>() const  // NOLINT: a writable view is a readable one
      requires(!std::is_const_v<Void>) {
    return {data, dtype, shape, strides};
  }
};
using AnyTensor = BasicAnyTensor<void>;
using AnyConstTensor = BasicAnyTensor<const void>;

inline AnyTensor contiguous_tensor(void* data, DType dtype,
                                   const std::array<std::int64_t, 3>& shape) {
  return {data, dtype, shape, contiguous_strides(shape)};
}
inline AnyConstTensor contiguous_tensor(const void* data, DType dtype,
                                        const std::array<std::int64_t, 3>& shape) {
  return {data, dtype, shape, contiguous_strides(shape)};
}

}  // namespace cpattn
