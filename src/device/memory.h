// Buffer: owned, aligned memory on one device.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace cpattn {

/// Move-only. Memory of the host, unless a Device made it.
class Buffer {
 public:
  Buffer() = default;
  /// Zero-initialised host memory, aligned to 64 bytes (2 MiB, with a huge-page hint, from 4 MiB
  /// on). Throws InvalidArgument when `size_bytes` cannot be had.
  explicit Buffer(std::size_t size_bytes);

  /// Memory of another kind; `free(owner, memory)` gives it back, and `owner` is kept until then.
  using FreeFunction = void (*)(void* owner, std::byte* memory) noexcept;
  Buffer(std::byte* memory, std::size_t size_bytes, FreeFunction free, std::shared_ptr<void> owner)
      : data_(memory, Free{free, std::move(owner)}), size_bytes_(size_bytes) {}

  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> bytes() const { return {data_.get(), size_bytes_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

  /// Gives the memory up without freeing it (std::free may later, if it is the host's).
  std::byte* release() {
    size_bytes_ = 0;
    return data_.release();
  }

 private:
  struct Free {
    FreeFunction free;  ///< null: the host's
    std::shared_ptr<void> owner;
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_bytes_ = 0;
};

}  // namespace cpattn
