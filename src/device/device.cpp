#include "src/device/device.h"

#include <cstring>

#include "src/base/error.h"
#include "src/device/cuda_driver.h"

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

std::string CpuDevice::problem_with(const void* data) const {
  const int gpu = gpu_of_address(data);
  return gpu < 0 ? "" : detail::concat("memory of cuda:", gpu, ", expected host memory");
}

std::string CpuDevice::problem_with(Stream stream) const {
  return stream.handle == nullptr ? "" : "stream: a stream was given, expected none on the cpu";
}

}  // namespace cpattn
