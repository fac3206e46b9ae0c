// An image: a header and arrays behind each other in one run of bytes, which is written on the host
// once and copied to the device as it is. Every part begins at a multiple of 16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "src/base/integers.h"

namespace cpattn::cuda {

inline constexpr std::int64_t kImageAlignment = 16;

/// Reserves the parts of an image one by one, then holds its bytes.
class ImageParts {
 public:
  explicit ImageParts(std::size_t header_bytes) { reserve(1, header_bytes); }

  template <class T>
  std::int64_t reserve(const std::vector<T>& items) {
    return reserve(items.size(), sizeof(T));
  }

  /// All parts are reserved: the bytes, zeros so far.
  template <class Header>
  void begin(const Header& header) {
    bytes_.resize(static_cast<std::size_t>(end_));
    std::memcpy(bytes_.data(), &header, sizeof(header));
  }

  template <class T>
  void write(std::int64_t offset, const std::vector<T>& items) {
    if (!items.empty()) std::memcpy(bytes_.data() + offset, items.data(), items.size() * sizeof(T));
  }

  template <class Header>
  const Header& header() const {
    return *reinterpret_cast<const Header*>(bytes_.data());
  }

  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::int64_t reserve(std::size_t count, std::size_t size) {
    const std::int64_t offset = end_;
    end_ = round_up(end_ + static_cast<std::int64_t>(count * size), kImageAlignment);
    return offset;
  }

  std::int64_t end_ = 0;
  std::vector<std::byte> bytes_;
};

}  // namespace cpattn::cuda
