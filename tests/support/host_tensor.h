// HostTensor: an owning [tokens, heads, dim] tensor of any of our types, for tests.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "src/base/tensor_view.h"
#include "tests/support/random.h"

namespace cpattn::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

class HostTensor {
 public:
  using Shape = std::array<std::int64_t, 3>;

  HostTensor() : HostTensor(DType::f32, Shape{0, 0, 0}) {}

  /// Contiguous; every element is NaN until it is set, so that what nobody writes shows.
  HostTensor(DType dtype, const Shape& shape)
      : HostTensor(dtype, shape, contiguous_strides(shape)) {}

  /// With these (positive) strides; the gaps between rows stay NaN for ever.
  HostTensor(DType dtype, const Shape& shape, const Shape& strides)
      : dtype_(dtype), shape_(shape), strides_(strides) {
    std::int64_t elements = 1;
    for (std::size_t i = 0; i < 3; ++i)
      elements += std::max<std::int64_t>(shape[i] - 1, 0) * strides[i];
    bytes_.resize(static_cast<std::size_t>(elements) * size_of(dtype));
    for (std::int64_t i = 0; i < elements; ++i) store_from_float(bytes_.data(), dtype, i, kNan);
  }

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t tokens() const { return shape_[0]; }
  AnyTensor view() { return {bytes_.data(), dtype_, shape_, strides_}; }
  AnyConstTensor view() const { return {bytes_.data(), dtype_, shape_, strides_}; }

  float at(std::int64_t token, std::int64_t head, std::int64_t d) const {
    return load_as_float(bytes_.data(), dtype_, place(token, head, d));
  }
  void set(std::int64_t token, std::int64_t head, std::int64_t d, float value) {
    store_from_float(bytes_.data(), dtype_, place(token, head, d), value);
  }

  /// The bit pattern of an element, in the low bits.
  std::uint32_t bits_at(std::int64_t token, std::int64_t head, std::int64_t d) const {
    if (dtype_ == DType::f32) return std::bit_cast<std::uint32_t>(at(token, head, d));
    std::uint16_t bits = 0;
    const auto* source = bytes_.data() + 2 * static_cast<std::size_t>(place(token, head, d));
    std::copy_n(source, 2, reinterpret_cast<std::byte*>(&bits));
    return bits;
  }

  /// Sets every element to value_of(token, head, d), rounded once.
  template <class Function>
  HostTensor& fill(Function&& value_of) {
    for (std::int64_t t = 0; t < shape_[0]; ++t)
      for (std::int64_t h = 0; h < shape_[1]; ++h)
        for (std::int64_t d = 0; d < shape_[2]; ++d) set(t, h, d, value_of(t, h, d));
    return *this;
  }

  /// Standard normal numbers of the logical index, whatever the strides.
  HostTensor& fill_normal(std::uint64_t seed, float factor = 1.0f) {
    return fill([&](std::int64_t t, std::int64_t h, std::int64_t d) {
      const std::int64_t index = (t * shape_[1] + h) * shape_[2] + d;
      return factor * random_normal(seed, static_cast<std::uint64_t>(index));
    });
  }

  /// The given rows, in that order, contiguous.
  HostTensor rows(std::span<const std::int64_t> which) const {
    HostTensor result(dtype_, {static_cast<std::int64_t>(which.size()), shape_[1], shape_[2]});
    for (std::size_t i = 0; i < which.size(); ++i)
      result.copy_row(static_cast<std::int64_t>(i), *this, which[i]);
    return result;
  }

  /// Row `to` becomes row `from` of `other`, bit for bit.
  void copy_row(std::int64_t to, const HostTensor& other, std::int64_t from) {
    const std::size_t row_bytes = static_cast<std::size_t>(shape_[2]) * size_of(dtype_);
    for (std::int64_t h = 0; h < shape_[1]; ++h)
      std::copy_n(other.view().row(from, h), row_bytes, view().row(to, h));
  }

  /// The same elements under other strides.
  HostTensor with_strides(const Shape& strides) const {
    HostTensor result(dtype_, shape_, strides);
    for (std::int64_t t = 0; t < shape_[0]; ++t) result.copy_row(t, *this, t);
    return result;
  }

 private:
  std::int64_t place(std::int64_t token, std::int64_t head, std::int64_t d) const {
    return token * strides_[0] + head * strides_[1] + d * strides_[2];
  }

  DType dtype_;
  Shape shape_;
  Shape strides_;
  std::vector<std::byte> bytes_;
};

}  // namespace cpattn::testing
