#include "src/device/memory.h"

#include <sys/mman.h>  // madvise

#include <cstdint>  // PTRDIFF_MAX
#include <cstdlib>
#include <cstring>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn {

Buffer::Buffer(std::size_t size_bytes) : size_bytes_(size_bytes) {
  constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;
  if (size_bytes == 0) return;
  require(size_bytes <= PTRDIFF_MAX, "cannot allocate ", size_bytes, " bytes of host memory");
  const bool is_big = size_bytes >= 2 * kHugePage;
  const std::size_t alignment = is_big ? kHugePage : kLine;
  void* memory = std::aligned_alloc(alignment, round_up(size_bytes, alignment));
  require(memory != nullptr, "cannot allocate ", size_bytes, " bytes of host memory");
  if (is_big)
    madvise(memory, round_up(size_bytes, alignment), MADV_HUGEPAGE);  // a hint: failing is fine
  std::memset(memory, 0, size_bytes);
  data_.reset(static_cast<std::byte*>(memory));
}

void Buffer::Free::operator()(std::byte* memory) const noexcept {
  if (free == nullptr) {
    std::free(memory);
  } else {
    free(owner.get(), memory);
  }
}

}  // namespace cpattn
