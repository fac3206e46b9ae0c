// StepImages: what launches on a device read of each step's blocks and programs (KernelTable's
// step_image), copied there once.
#pragma once

#include <cstddef>
#include <vector>

#include "src/device/device.h"

namespace cpattn {

class StepImages {
 public:
  StepImages() = default;
  /// One image for each step; an empty one for a step without work. They lie one behind the other,
  /// each at a multiple of 256 bytes.
  StepImages(const std::vector<std::vector<std::byte>>& images, Device& device);

  /// Null when there are none: kernels that read their arguments where they are.
  const std::byte* at(std::size_t step) const {
    return offsets_.empty() ? nullptr : memory_.data() + offsets_[step];
  }

  /// What a plan accounts.
  static std::size_t size_bytes(const std::vector<std::vector<std::byte>>& images);

 private:
  std::vector<std::size_t> offsets_;
  Buffer memory_;
};

}  // namespace cpattn
