#include "cp/step_images.h"

#include <cstring>

#include "src/base/integers.h"

namespace cpattn {
namespace {

std::size_t place_bytes(const std::vector<std::byte>& image) {
  constexpr std::size_t kAlignment = 256;
  return round_up(image.size(), kAlignment);
}

}  // namespace

std::size_t StepImages::size_bytes(const std::vector<std::vector<std::byte>>& images) {
  std::size_t bytes = 0;
  for (const std::vector<std::byte>& image : images) bytes += place_bytes(image);
  return bytes;
}

StepImages::StepImages(const std::vector<std::vector<std::byte>>& images, Device& device) {
  if (images.empty()) return;
  std::vector<std::byte> joined(size_bytes(images));
  std::size_t end = 0;
  for (const std::vector<std::byte>& image : images) {
    offsets_.push_back(end);
    if (!image.empty()) std::memcpy(joined.data() + end, image.data(), image.size());
    end += place_bytes(image);
  }
  memory_ = device.allocate(joined.size());
  device.upload(memory_.data(), joined);
}

}  // namespace cpattn
