// Buffer: owned, aligned memory on one device. The CPU is the only device of this build.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace cpattn {

/// Zero-initialised host memory, aligned to 64 bytes (2 MiB, with a huge-page hint, from 4 MiB on).
/// Move-only.
class Buffer {
 public:
  Buffer() = default;
  /// Throws InvalidArgument when `size_bytes` cannot be had.
  explicit Buffer(std::size_t size_bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> bytes() const { return {data_.get(), size_bytes_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

  /// Gives the memory up without freeing it (std::free may later).
  std::byte* release() {
    size_bytes_ = 0;
    return data_.release();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_bytes_ = 0;
};

}  // namespace cpattn
