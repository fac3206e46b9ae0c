#include "kernels/cuda/host/shared_memory.h"

#include <sys/mman.h>

#include <cstring>

#include "kernels/cuda/host/sanitizers.h"
#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn::cuda_host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kNotANumber = 0xFF;  // every byte: NaN in f32, f16 and bf16
constexpr unsigned char kBehind = 0xA5;

}  // namespace

void SharedMemory::unmap() {
  if (data_ != nullptr) munmap(data_, mapped_bytes_ + kPage);
  data_ = nullptr;
}

void SharedMemory::prepare(std::size_t size_bytes) {
  const std::size_t bytes = round_up(size_bytes, kPage);
  // A new mapping makes the thread sanitizer forget the accesses of the block before, which had
  // shared memory of its own.
  if (data_ == nullptr || bytes != mapped_bytes_ || is_checked_for_races()) {
    unmap();
    void* memory =
        mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require<Unsupported>(memory != MAP_FAILED, "no memory for ", bytes, " bytes of shared memory");
    data_ = static_cast<std::byte*>(memory);
    mapped_bytes_ = bytes;
    mprotect(data_ + bytes, kPage, PROT_NONE);
  }
  size_bytes_ = size_bytes;
  allow_access(data_, bytes);
  std::memset(data_, kNotANumber, size_bytes);
  std::memset(data_ + size_bytes, kBehind, bytes - size_bytes);
  forbid_access(data_ + size_bytes, bytes - size_bytes);
}

bool SharedMemory::is_overrun() const {
  const auto* bytes = reinterpret_cast<const unsigned char*>(data_);
  for (std::size_t i = size_bytes_; i < mapped_bytes_; ++i) {
    if (bytes[i] != kBehind) return true;
  }
  return false;
}

}  // namespace cpattn::cuda_host
