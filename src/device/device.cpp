#include "src/device/device.h"

#include <cstring>

namespace cpattn {

void CpuDevice::upload(std::byte* to, std::span<const std::byte> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

void CpuDevice::download(std::span<std::byte> to, const std::byte* from) {
  if (!to.empty()) std::memcpy(to.data(), from, to.size());
}

void CpuDevice::copy(std::byte* to, std::span<const std::byte> from, Stream) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

std::string CpuDevice::problem_with(Stream stream) const {
  return stream.handle == nullptr ? "" : "stream: a stream was given, expected none on the cpu";
}

}  // namespace cpattn
