// Dynamic shared memory of the block that is running, with 32-bit addresses as on the device.
//
// Filled with NaN before each block. Begins at address 1024, not 0 (as on the device, so that code
// cannot take an offset for an address), aligned to 1024 bytes in both worlds. Bytes behind its end
// are watched: up to the page's end by the address sanitizer, or, without it, by a pattern that is
// compared when the block ends; the next page faults.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpattn::cuda_host {

using SharedAddress = std::uint32_t;
inline constexpr SharedAddress kSharedBegin = 1024;

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { unmap(); }

  /// Fresh contents for the next block.
  void prepare(std::size_t size_bytes);
  /// Whether the block wrote behind the end.
  bool is_overrun() const;

  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  void unmap();

  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;  ///< whole pages, without the guard
};

}  // namespace cpattn::cuda_host
