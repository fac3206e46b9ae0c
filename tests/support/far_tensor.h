// FarTensor: a tensor whose rows lie further apart than 32 bits of elements can say. Only the pages
// that are touched take memory.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstring>

#include "src/base/error.h"
#include "src/base/tensor_view.h"

namespace cpattn::testing {

class FarTensor {
 public:
  /// In elements: past 2^31, and a multiple of 16 bytes for every type.
  static constexpr std::int64_t kRowStride = (std::int64_t{1} << 31) + 16;

  FarTensor(DType dtype, const std::array<std::int64_t, 3>& shape)
      : size_bytes_(static_cast<std::size_t>(shape[0] * kRowStride) * size_of(dtype)),
        memory_(::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    require<InternalError>(memory_ != MAP_FAILED, "mmap of ", size_bytes_, " bytes failed");
    view_ = {memory_, dtype, shape, {kRowStride, shape[2], 1}};
  }
  explicit FarTensor(const AnyConstTensor& from) : FarTensor(from.dtype, from.shape) {
    for_each_head(from, view_);
  }
  FarTensor(const FarTensor&) = delete;
  FarTensor& operator=(const FarTensor&) = delete;
  ~FarTensor() { ::munmap(memory_, size_bytes_); }

  const AnyTensor& view() const { return view_; }
  void copy_to(const AnyTensor& to) const { for_each_head(view_, to); }

 private:
  static void for_each_head(const AnyConstTensor& from, const AnyTensor& to) {
    const std::size_t bytes = static_cast<std::size_t>(from.shape[2]) * size_of(from.dtype);
    for (std::int64_t row = 0; row < from.shape[0]; ++row)
      for (std::int64_t head = 0; head < from.shape[1]; ++head)
        std::memcpy(to.row(row, head), from.row(row, head), bytes);
  }

  std::size_t size_bytes_;
  void* memory_;
  AnyTensor view_;
};

}  // namespace cpattn::testing
